// Review by keys. The next trial is shown only once the answer is stored; until then it is sent again and again.
const form = document.querySelector("form[data-review]");

if (form) {
  const state = form.querySelector("[data-state]");
  let sending = false, skipping = false;
  const pause = (time) => new Promise((done) => setTimeout(done, time));

  async function send(button) {
    if (sending) return;
    sending = true;
    button.classList.add("chosen");
    const body = new URLSearchParams(new FormData(form, button));
    for (let tries = 0; ; tries++) {
      try {
        const answer = await fetch(form.action, { method: "POST", body, headers: { accept: "application/json" } });
        if (answer.ok) {
          const { next } = await answer.json();
          removeEventListener("beforeunload", warn);
          location.replace(next);
          return;
        }
        if (answer.status < 500) {
          state.textContent = `Not saved: ${await answer.text()}`;
          sending = false;
          return;
        }
      } catch {
        // The server is away: the answer stays here until it is back.
      }
      if (!tries) addEventListener("beforeunload", warn);
      state.textContent = "Not saved yet: the server does not answer. Trying again. Keep this page open.";
      await pause(1000);
    }
  }
  const warn = (event) => event.preventDefault();

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (event.submitter) send(event.submitter);
  });

  const click = (selector) => document.querySelector(selector)?.click();
  const keys = {
    s: () => {
      skipping = true;
      form.querySelector("[data-skip]").focus();
    },
    c: () => form.elements.comment.focus(),
    u: () => click("[data-undo]"),
    e: () => click("[data-expected]"),
    t: () => click("[data-transcript]"),
  };

  // Before the keys of all pages, some of which mean something else here.
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("textarea, input, dialog")) return;
    const button = form.querySelector(skipping ? `[data-skip="${CSS.escape(event.key)}"]` : `[data-key="${CSS.escape(event.key)}"]`);
    if (event.key === "Escape") skipping = false;
    if (button) send(button);
    else if (Object.hasOwn(keys, event.key)) keys[event.key]();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);
}
