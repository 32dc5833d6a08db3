// Keys: move among rows and events, open, search, collapse. Everything they do can be done with links and buttons too.
const rows = () => [...document.querySelectorAll(".row, .transcript > .ev")];
let here = -1, pending = "";

function move(step) {
  const all = rows();
  if (!all.length) return;
  all[here]?.classList.remove("here");
  here = Math.min(Math.max(here + step, 0), all.length - 1);
  all[here].classList.add("here");
  all[here].scrollIntoView({ block: "nearest" });
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
}

function collapse() {
  const events = [...document.querySelectorAll(".transcript > details")];
  const open = events.some((event) => event.open);
  for (const event of events) event.open = !open;
  const button = document.querySelector("[data-collapse]");
  if (button) button.textContent = open ? "expand all" : "collapse all";
}

const help = document.getElementById("help");
const showHelp = () => help && !help.open && help.showModal();
document.querySelector("[data-help]")?.addEventListener("click", showHelp);
document.querySelector("[data-collapse]")?.addEventListener("click", collapse);

const keys = {
  j: () => move(1),
  k: () => move(-1),
  Enter: () => rows()[here]?.querySelector("a.main, a.anchor")?.click(),
  "[": () => follow('[rel="prev"]'),
  "]": () => follow('[rel="next"]'),
  "/": () => document.querySelector("[data-search]")?.focus(),
  c: collapse,
  m: () => follow(document.querySelector('[data-form="markdown"][aria-current]') ? '[data-form="text"]' : '[data-form="markdown"]'),
  y: () => document.querySelector("[data-copy-link]")?.click(),
  "?": showHelp,
  "g r": () => follow(".brand"),
  "g t": () => follow("[data-trials]"),
};

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, select, textarea, button, a, summary, dialog");
  if (event.key === "Escape" && field) field.blur();
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (field && (field.matches("input, select, textarea, dialog") || event.key === "Enter")) return;
  const name = pending ? `${pending} ${event.key}` : event.key;
  pending = !pending && event.key === "g" ? "g" : "";
  if (Object.hasOwn(keys, name)) {
    event.preventDefault();
    keys[name]();
  }
});

// What scrolls can be reached and scrolled with the keyboard. Asked when it comes near the window: the sizes of
// thousands of messages that are not laid out yet take minutes.
const nearby = new IntersectionObserver(
  (seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      if (target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight) target.tabIndex = 0;
    }
  },
  { rootMargin: "3000px 0px" },
);
for (const place of document.querySelectorAll(".scroll, figure, pre")) nearby.observe(place);

// A link to an event of a collapsed transcript opens it.
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();
