// The confusion matrix, and a gallery of the images of a class, a prediction, or a cell of it.

import { bar, count, h, isNumber, message, soon, visible } from "./dom.js";
import { address, get } from "./net.js";

const PAGE = 100, NUMBERS_UP_TO = 15, BUTTONS_UP_TO = 40, PAIRS = 12;

export function predictions(panel, run, signal) {
  let answers = null, closeGallery = () => {};
  const filter = { actual: "", predicted: "", show: "wrong", order: "confident" };
  const dialogKeys = {};
  panel.replaceChildren(h("p", { class: "quiet" }, "Reading the predictions …"));
  get("answers", { run }, { signal }).then(found => { answers = found; build(); }, error => {
    if (error.name !== "AbortError") panel.replaceChildren(message("No predictions", error.message));
  });

  function build() {
    const gallery = h("div", { class: "gallery" }), head = h("div", { class: "tools gallery-tools" });
    if (!answers.wrong) filter.show = "all";
    const parts = [];
    if (answers.cells) {
      parts.push(h("section", { class: "confusion-box" }, h("h2", {}, "Confusion matrix"),
        h("p", { class: "lead" }, `A row for each actual class, a column for each prediction, of the ${answers.split} images. Choose a cell to see its images.`),
        answers.classes.length <= BUTTONS_UP_TO ? matrix() : picture()),
        h("section", {}, h("h2", {}, "Most confused"), h("p", { class: "lead" }, "Mistakes, the most frequent first."), pairs()));
    }
    panel.replaceChildren(
      answers.images ? h("p", { class: "stopped" }, answers.images) : "",
      parts.length ? h("div", { class: "split" }, parts) : "",
      h("section", { id: "gallery" }, h("h2", {}, "Images"), head, gallery));
    tools(head);
    refill();

    function refill() {
      closeGallery();
      closeGallery = fill(gallery, head);
    }
    build.refill = refill;
    build.tools = () => tools(head);
  }

  function choose(actual, predicted) {
    Object.assign(filter, { actual: String(actual), predicted: String(predicted), show: "all" });
    build.tools();
    build.refill();
    document.getElementById("gallery").scrollIntoView({ block: "start" });
  }

  function tools(head) {
    const change = (key, value) => { filter[key] = value; build.tools(); build.refill(); };
    const select = (key, title, options) => h("label", {}, h("span", {}, title),
      h("select", { onchange: event => change(key, event.target.value) }, options.map(([value, text]) =>
        h("option", { value, selected: String(filter[key]) === value }, text))));
    const classes = answers.classes.map((name, i) => [String(i), name]);
    const parts = [];
    if (answers.wrong !== null)
      parts.push(h("div", { class: "segments", role: "group", "aria-label": "Answers" }, [["wrong", "Wrong", answers.wrong], ["right", "Right", answers.count - answers.wrong], ["all", "All", answers.count]].map(([value, text, number]) =>
        h("button", { "aria-pressed": filter.show === value, onclick: () => change("show", value) }, text, h("i", {}, count(number))))));
    if (answers.totals) {
      parts.push(select("actual", "Actual", [["", "any class"], ...classes]));
      parts.push(select("predicted", "Predicted", [["", "any class"], ...classes]));
    }
    const orders = answers.wrong === null ? [["confident", "largest error first"], ["unsure", "smallest error first"], ["data", "as in the data"]]
      : [["confident", "most confident first"], ["unsure", "least confident first"], ["data", "as in the data"]];
    parts.push(select("order", "Order", orders));
    head.replaceChildren(...parts, h("p", { class: "quiet total", role: "status" }));
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

  /** The images of the filter. Only those in the window exist; their pages are requested when they come near. */
  function fill(box, head) {
    const pages = new Map(), stopped = new AbortController();
    const note = head.querySelector(".total"), grid = h("div", { class: "window" });
    let total = null, columns = 1, rowHeight = 1, index = 0;
    box.replaceChildren(grid);

    const request = at => {
      if (pages.has(at)) return;
      pages.set(at, null);
      get("samples", { run, ...filter, offset: at * PAGE, limit: PAGE }, { signal: stopped.signal }).then(page => {
        pages.set(at, page.samples);
        total = page.total;
        note.textContent = `${count(total)} image${total === 1 ? "" : "s"}`;
        lay();
      }, error => { if (error.name !== "AbortError") { pages.delete(at); grid.replaceChildren(message("The images cannot be listed", error.message)); } });
    };
    const sampleAt = i => pages.get(Math.floor(i / PAGE))?.[i % PAGE];

    function lay() {
      const width = grid.clientWidth, least = width < 500 ? 96 : 116, gap = 12;
      columns = Math.max(2, Math.floor((width + gap) / (least + gap)));
      const tile = (width - gap * (columns - 1)) / columns, [height, wide] = answers.shape;
      const image = Math.round(tile * Math.min(1.3, Math.max(0.6, height / wide)));
      rowHeight = image + 46 + gap;
      const rows = Math.ceil((total || 0) / columns);
      grid.style.height = `${Math.max(total === null ? rowHeight : 0, rows * rowHeight)}px`;
      const [first, last] = visible(grid, rowHeight, rows, 2);
      const tiles = [];
      for (let i = first * columns; i < Math.min(total || 0, last * columns); i++) {
        request(Math.floor(i / PAGE));
        tiles.push(tileOf(i, { left: `${(i % columns) * (tile + gap)}px`, top: `${Math.floor(i / columns) * rowHeight}px`, width: `${tile}px`, height: `${rowHeight - gap}px` }, image));
      }
      if (total === 0) tiles.push(h("p", { class: "quiet" }, "There are none."));
      grid.replaceChildren(...tiles);
    }

    const made = new Map();
    function tileOf(i, place, height) {
      const sample = sampleAt(i), key = `${i} ${Boolean(sample)} ${place.width}`;
      if (made.get(i)?.key === key) { Object.assign(made.get(i).element.style, place); return made.get(i).element; }
      const kind = sample && sample.right !== null ? (sample.right ? "right" : "wrong") : "";
      const element = h("button", { class: "tile", style: place, "aria-label": sample ? `${sample.actual}, predicted ${sample.predicted}` : "loading", onclick: () => { index = i; show(); } },
        h("span", { class: "frame", style: { height: `${height}px` } }, !sample ? null : sample.image ? h("img", { src: address("image", { run, index: sample.i }), alt: "", class: answers.tiny ? "tiny" : null, decoding: "async" }) : h("span", { class: "quiet" }, "not kept")),
        sample ? [h("span", { class: `label ${kind}` }, sample.actual === sample.predicted ? sample.actual : `${sample.actual} / ${sample.predicted}`),
          h("span", { class: "quiet" }, isNumber(sample.confidence) ? sample.confidence.toFixed(3) : "")] : null);
      made.set(i, { key, element });
      if (made.size > 2000) made.delete(made.keys().next().value);
      return element;
    }

    const dialog = h("dialog", { class: "viewer", "aria-label": "Image" });
    box.append(dialog);
    async function show() {
      const sample = sampleAt(index);
      if (!sample) { request(Math.floor(index / PAGE)); setTimeout(() => dialog.open && show(), 150); return; }
      const close = h("button", { class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "×");
      const answer = h("ul", { class: "bars" });
      const kind = sample.right === null ? "" : sample.right ? "right" : "wrong";
      dialog.replaceChildren(close, h("div", { class: "view" }, sample.image ? h("img", { src: address("image", { run, index: sample.i, full: 1 }), alt: sample.actual, class: answers.tiny ? "tiny" : null }) : h("p", { class: "quiet" }, "This image was not kept.")),
        h("div", {}, h("dl", { class: "answer" }, h("div", {}, h("dt", {}, "actual"), h("dd", {}, sample.actual)), h("div", {}, h("dt", {}, "predicted"), h("dd", { class: kind }, sample.predicted))), answer,
          h("p", { class: "quiet" }, `${count(index + 1)} of ${count(total)} · image ${sample.i} of the ${answers.split} images`),
          h("div", { class: "tools" }, h("button", { onclick: () => step(-1) }, "Previous"), h("button", { onclick: () => step(1) }, "Next"))));
      if (!dialog.open) dialog.showModal();
      const now = index;
      try {
        const full = await get("samples", { run, index: sample.i }, { signal: stopped.signal });
        if (now === index) answer.replaceChildren(...(full.answer.classes || []).map((name, i) => bar(name, full.answer.probabilities[i], full.answer.probabilities[i].toFixed(3), name === full.actual ? "" : "other")));
      } catch (error) {
        if (error.name !== "AbortError") answer.replaceChildren(h("li", { class: "quiet" }, error.message));
      }
    }
    const step = by => { index = Math.min(total - 1, Math.max(0, index + by)); show(); };
    Object.assign(dialogKeys, { ArrowLeft: () => step(-1), ArrowRight: () => step(1) });

    const seen = soon(lay), sizes = new ResizeObserver(seen);
    addEventListener("scroll", seen, { passive: true });
    sizes.observe(grid);
    request(0);
    return () => { stopped.abort(); sizes.disconnect(); removeEventListener("scroll", seen); };
  }

  return { close: () => closeGallery(), dialogKeys };
}
