// Which view is shown, by the address, and the keys that work everywhere.

import { h, message } from "./dom.js";
import { listen, load } from "./net.js";
import { runsView } from "./runs.js";

const main = document.getElementById("main"), help = document.getElementById("help");
const colours = document.getElementById("colours");
theme.attach(colours);
let shown = { keys: {}, close: () => {} };

async function show() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  shown.close();
  shown = { keys: {}, close: () => {} };
  const view = name || "runs";
  for (const link of document.querySelectorAll("nav a"))
    link.toggleAttribute("aria-current", link.dataset.view === view || (view === "run" && link.dataset.view === "runs"));
  document.title = "flatout board";
  try {
    if (view === "run") {
      const { runView } = await import("./run.js");
      shown = runView(main, rest[0], rest[1]);
    } else if (view === "compare") {
      const { compareView } = await import("./compare.js");
      listen();
      shown = compareView(main, rest);
    } else {
      listen();
      shown = runsView(main);
    }
  } catch (error) {
    main.replaceChildren(message("This view cannot be shown", error.message));
  }
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches?.("input:not([type=checkbox]), select, textarea");
  if (document.querySelector("dialog[open]")) return;
  if (isTyping && event.key !== "Escape") return;
  if (isTyping) event.target.blur();
  // A key that presses what has the focus does only that.
  if (event.key === "Enter" && event.target.matches?.("a, button, summary, label")) return;
  if (event.key === "?") return help.showModal();
  if (event.key === "t") return colours.click();
  const action = shown.keys?.[event.key];
  if (action) { event.preventDefault(); action(); }
});

addEventListener("hashchange", show);
load().then(show, error => main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "The board cannot be shown"), h("p", {}, error.message))));
