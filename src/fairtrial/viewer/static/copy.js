// Copy a command, or the address of the page.
async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "press Ctrl-C";
    const range = document.createRange();
    range.selectNodeContents(button.previousElementSibling ?? button);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  }
  setTimeout(() => (button.textContent = before), 1500);
}

for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", () => copy(button, button.dataset.copy));
for (const button of document.querySelectorAll("[data-copy-link]"))
  button.addEventListener("click", () => copy(button, location.href));
