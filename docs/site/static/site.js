"use strict";

// What scrolls can be reached with the keyboard.
function reachable() {
  for (const box of document.querySelectorAll("pre, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reachable);
addEventListener("resize", reachable);

// A browser refuses to read one file from another: on disk, the search takes the excerpts of pages from a script.
if (location.protocol === "file:" && document.getElementById("search-results")) {
  const texts = new Promise((found) => {
    const script = document.createElement("script");
    script.src = "page-texts.js";
    script.onload = () => found(pageTexts);
    document.head.append(script);
  });
  window.fetch = (address) => texts.then((pages) => new Response(pages[address.replace(/^\.\//, "")] || ""));
}
