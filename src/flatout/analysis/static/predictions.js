// The confusion matrix, whose cells open their images.

import { count, h, isNumber, message } from "./dom.js";
import { address, get } from "./net.js";

const NUMBERS_UP_TO = 15, BUTTONS_UP_TO = 40, PAIRS = 12;

/** Fills the panel, and returns what ends its requests. */
export function predictions(panel, run, signal) {
  const gallery = h("section", { id: "gallery" });
  let answers = null, asked = new AbortController();
  panel.replaceChildren(h("p", { class: "quiet" }, "Reading the predictions …"));
  get("answers", { run }, { signal }).then(found => { answers = found; build(); }, error => {
    if (error.name !== "AbortError") panel.replaceChildren(message("No predictions", error.message));
  });

  function build() {
    const parts = [];
    if (answers.kept !== null)
      parts.push(h("p", { class: "stopped" }, `Only the ${answers.kept} images of the report can be shown: the decoded images of this run are not in the cache; flatout evaluate RUN decodes those of files again.`));
    if (answers.cells)
      parts.push(h("div", { class: "split" },
        h("section", { class: "confusion-box" }, h("h2", {}, "Confusion matrix"),
          h("p", { class: "lead" }, `A row for each actual class, a column for each prediction, of the ${answers.split} images. Choose a cell to see its images.`),
          answers.classes.length <= BUTTONS_UP_TO ? matrix() : picture()),
        h("section", {}, h("h2", {}, "Most confused"), h("p", { class: "lead" }, "Mistakes, the most frequent first."), pairs())));
    panel.replaceChildren(...parts, gallery);
    show(answers.wrong === null ? "Largest errors" : "Mistakes", {});
  }

  function choose(actual, predicted) {
    const names = [answers.classes[actual], answers.classes[predicted]];
    show(actual === predicted ? names[0] : names.join(" / "), { actual, predicted });
    gallery.scrollIntoView({ block: "start" });
  }

  async function show(title, cell) {
    asked.abort();
    asked = new AbortController();
    try {
      const { total, samples } = await get("samples", { run, ...cell }, { signal: asked.signal });
      const some = samples.length < total ? `, the first ${count(samples.length)}` : "";
      gallery.replaceChildren(h("h2", {}, title), h("p", { class: "lead total" }, `${count(total)} image${total === 1 ? "" : "s"}${some}`),
        h("div", { class: "gallery" }, samples.map(tile)));
    } catch (error) {
      if (error.name !== "AbortError") gallery.replaceChildren(message("The images cannot be listed", error.message));
    }
  }

  function tile(sample) {
    const kind = sample.right === null ? "" : sample.right ? "right" : "wrong";
    const image = sample.image ? h("img", { src: address("image", { run, index: sample.i }), alt: "", loading: "lazy", class: answers.tiny ? "tiny" : null }) : h("span", { class: "quiet" }, "not kept");
    return h("div", { class: "tile" }, h("span", { class: "frame" }, image),
      h("span", { class: `label ${kind}` }, sample.actual === sample.predicted ? sample.actual : `${sample.actual} / ${sample.predicted}`),
      h("span", { class: "quiet" }, isNumber(sample.confidence) ? sample.confidence.toFixed(3) : ""));
  }

  function pairs() {
    const wrong = answers.cells.filter(([a, p]) => a !== p).sort((x, y) => y[2] - x[2]).slice(0, PAIRS);
    if (!wrong.length) return h("p", {}, "None: every answer is right.");
    return h("ul", { class: "pairs-list" }, wrong.map(([a, p, n]) => h("li", {}, h("button", { onclick: () => choose(a, p) },
      h("span", {}, h("b", {}, answers.classes[a]), " taken for ", h("b", {}, answers.classes[p])), h("span", { class: "value" }, `${count(n)} of ${count(answers.totals[a])}`)))));
  }

  function cells() {
    const found = new Map();
    for (const [a, p, n] of answers.cells) found.set(a * answers.classes.length + p, n);
    return found;
  }

  const strength = (n, total) => (n ? Math.max(0.06, Math.sqrt(n / Math.max(1, total))) : 0);

  /** Few classes: a table of buttons, each with its number. */
  function matrix() {
    const K = answers.classes.length, found = cells(), names = answers.classes;
    const grid = h("div", { class: `confusion${K > NUMBERS_UP_TO ? " many" : ""}`, role: "grid", "aria-label": "Confusion matrix", style: { gridTemplateColumns: `minmax(2rem, max-content) repeat(${K}, minmax(0, 1fr))` } });
    // Names of columns are slanted: room for the longest of them.
    grid.style.setProperty("--names", `${Math.min(6, 1.4 + 0.4 * Math.max(...names.map(name => name.length)))}rem`);
    grid.append(h("span", { class: "corner" }), ...names.map(name => h("span", { class: "column", title: name }, h("span", {}, name))));
    for (let a = 0; a < K; a++) {
      grid.append(h("span", { class: "row", title: names[a] }, names[a]));
      for (let p = 0; p < K; p++) {
        const n = found.get(a * K + p) || 0, level = strength(n, answers.totals[a]);
        const label = `${names[a]} taken for ${names[p]}: ${n}`;
        const cell = h(n ? "button" : "span", { class: `cell ${a === p ? "hit" : "miss"}${level > 0.63 ? " strong" : ""}${level > 0.86 ? " full" : ""}`, title: label, "aria-label": n ? label : null,
          onclick: n ? () => choose(a, p) : null }, K <= NUMBERS_UP_TO && n ? count(n) : "");
        cell.style.setProperty("--level", `${Math.round(100 * level)}%`);
        grid.append(cell);
      }
    }
    return h("div", { class: "scroll" }, grid);
  }

  /** Many classes: a picture with a pixel or more for each cell. */
  function picture() {
    const K = answers.classes.length, found = cells(), size = Math.max(1, Math.floor(1200 / K));
    const canvas = h("canvas", { width: K * size, height: K * size, class: "confusion-canvas", role: "img", "aria-label": `Confusion matrix of ${K} classes; the most confused are listed beside it` });
    const note = h("p", { class: "quiet total" }, "Point at a cell to read it.");
    const paint = () => {
      const style = getComputedStyle(document.documentElement), context = canvas.getContext("2d");
      context.clearRect(0, 0, canvas.width, canvas.height);
      for (const [a, p, n] of answers.cells) {
        context.globalAlpha = Math.max(0.12, strength(n, answers.totals[a]));
        context.fillStyle = style.getPropertyValue(a === p ? "--right" : "--wrong");
        context.fillRect(p * size, a * size, size, size);
      }
    };
    const at = event => {
      const box = canvas.getBoundingClientRect();
      const [p, a] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map(share => Math.min(K - 1, Math.max(0, Math.floor(share * K))));
      return [a, p, found.get(a * K + p) || 0];
    };
    canvas.addEventListener("mousemove", event => { const [a, p, n] = at(event); note.textContent = `${answers.classes[a]} taken for ${answers.classes[p]}: ${count(n)}`; });
    canvas.addEventListener("click", event => { const [a, p, n] = at(event); if (n) choose(a, p); });
    theme.watch(paint, signal);
    paint();
    return h("div", {}, canvas, note);
  }

  return () => asked.abort();
}
