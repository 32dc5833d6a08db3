// Forms send themselves when something is chosen; empty fields stay out of the address. Rates fill in when they are ready.
for (const form of document.querySelectorAll("form[data-submit]")) {
  form.addEventListener("change", (event) => {
    if (event.target.matches("select, input[type=checkbox]")) form.requestSubmit();
  });
  form.addEventListener("submit", () => {
    for (const field of form.elements)
      if (field.name && !field.value && field.type !== "checkbox") field.disabled = true;
  });
}
// A page that the browser brings back has its fields again.
addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll("form[data-submit] :disabled")) field.disabled = false;
});

for (const place of document.querySelectorAll("[data-rates]")) {
  if (!place.dataset.rates) continue;
  fetch(place.dataset.rates)
    .then((answer) => answer.json())
    .then(({ rates }) => {
      place.replaceChildren(
        ...rates.map((words) => {
          const part = document.createElement("span");
          part.className = "rate";
          part.textContent = words;
          return part;
        }),
      );
    })
    .catch(() => {});
}
