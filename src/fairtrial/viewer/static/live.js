// Numbers of running runs, changed in place. Rows never move; a hidden tab holds no connection.
function set(place, name, text) {
  const element = place.querySelector(`[data-${name}]`);
  if (element) element.textContent = text;
}

for (const place of document.querySelectorAll("[data-live]")) {
  let source = null, first = null;
  const start = () => {
    if (source || document.hidden || !place.dataset.live) return;
    source = new EventSource(place.dataset.live);
    source.addEventListener("progress", (event) => {
      const state = JSON.parse(event.data), now = Date.now() / 1000;
      first ??= { at: now, stored: state.stored };
      set(place, "stored", state.stored.toLocaleString("en"));
      set(place, "errors", state.errors.toLocaleString("en"));
      set(place, "tokens", state.tokens.toLocaleString("en"));
      if (now - first.at > 2) set(place, "rate", `${((state.stored - first.stored) / (now - first.at)).toFixed(1)}/s`);
      const bar = place.querySelector("progress");
      if (bar) bar.value = state.stored;
    });
    for (const end of ["ended", "gone"])
      source.addEventListener(end, () => {
        stop();
        place.dataset.live = "";
        set(place, "status", end === "gone" ? "deleted" : "ended");
        const note = place.querySelector("[data-ended]");
        if (note) note.hidden = false;
      });
  };
  const stop = () => {
    source?.close();
    source = null;
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  start();
}
