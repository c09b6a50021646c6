// Several runs over each other.

import { count, date, devices, duration, figure, h, isNumber, literal, message, score, soon } from "./dom.js";
import { get, onRuns, state } from "./net.js";
import { Chart, course } from "./curves.js";
import { chosen, status } from "./runs.js";

const COLOURS = 8;

export function compareView(main, ids) {
  const back = () => { location.hash = "#/"; };
  ids = ids.filter(Boolean);
  if (!ids.length) ids = [...chosen];
  document.title = "Compare · flatout board";
  if (ids.length < 1) {
    main.replaceChildren(message("No runs are chosen", "Choose two or more in the table, with the boxes at the left or with x, then compare them."), h("p", { class: "empty" }, h("a", { class: "button", href: "#/" }, "All runs")));
    return { keys: { Escape: back }, close: () => {} };
  }
  const colour = i => `series-${i % COLOURS}`;
  const charts = { loss: new Chart("Loss"), metric: new Chart("Result", { share: true }), rate: new Chart("Images per second") };
  const splits = h("select", { "aria-label": "Split", onchange: () => draw() }, [["held", "validation, else test"], ["train", "training"], ["test", "test"]].map(([value, text]) => h("option", { value }, text)));
  const figures = h("div", { class: "scroll" }), recipes = h("div", { class: "scroll" });
  const legend = h("ul", { class: "chips" });
  let found = { ids: [], metrics: {}, differences: [] }, seen = "";
  main.replaceChildren(h("div", { class: "title" }, h("h1", {}, `Compare ${ids.length} run${ids.length === 1 ? "" : "s"}`), splits), legend,
    h("div", { class: "curves" }, Object.values(charts).map(chart => chart.element)),
    h("section", {}, h("h2", {}, "Figures"), figures), h("section", {}, h("h2", {}, "Differences of the recipes"), recipes));

  function draw() {
    const key = lines => ["accuracy", "map", "mae"].find(name => lines.some(line => `valid_${name}` in line || `test_${name}` in line || `train_${name}` in line)) || "accuracy";
    const split = (lines, quantity) => (splits.value !== "held" ? splits.value : lines.some(line => isNumber(line[`valid_${quantity}`])) ? "valid" : "test");
    const series = name => ids.map((id, i) => {
      const lines = found.metrics[id] || [], quantity = name === "metric" ? key(lines) : name;
      const field = name === "rate" ? "images_per_second" : `${split(lines, quantity)}_${quantity}`;
      return course(lines, field, label(id), { colour: colour(i), width: 2 });
    });
    const metrics = metricsOf();
    if (metrics.size === 1) charts.metric.caption.textContent = [...metrics][0].replace(/^./, first => first.toUpperCase());
    charts.metric.share = [...metrics].every(name => /accuracy|precision/i.test(name));
    for (const [name, chart] of Object.entries(charts)) chart.update(series(name));
  }
  const metricsOf = () => new Set(ids.map(id => state.runs.get(id)?.metric).filter(Boolean));
  const label = id => (ids.filter(other => last(other) === last(id)).length > 1 ? id : last(id));
  const last = id => state.runs.get(id)?.name || id.split("/").at(-1);

  function tables() {
    const runs = ids.map(id => state.runs.get(id));
    legend.replaceChildren(...ids.map((id, i) => {
      const dot = h("i", {});
      dot.style.background = `var(--${colour(i)})`;
      return h("li", {}, dot, h("a", { href: `#/run/${encodeURIComponent(id)}` }, label(id)),
        h("a", { class: "remove", href: `#/compare/${ids.filter(other => other !== id).map(encodeURIComponent).join("/")}`, "aria-label": `Remove ${label(id)}`, onclick: () => chosen.delete(id) }, "×"));
    }));
    const rows = [
      ["status", run => status(run)], ["result", run => (isNumber(run.score) ? score(run.score) : "–"), "score", 1], ["metric", run => (run.score === null || !run.metric ? "–" : `${run.split} ${run.metric}`)],
      ["loss", run => figure(run.loss), "loss", -1], ["epochs", run => count(run.epochs_trained)], ["images per second", run => count(run.images_per_second), "images_per_second", 1],
      ["training time", run => duration(run.train_seconds), "train_seconds", -1], ["parameters", run => count(run.parameters)], ["model", run => run.model || "–"], ["devices", run => devices(run.devices) || "–"], ["date", run => date(run.date)],
    ];
    // Results and losses of different tasks have no best.
    const isOneTask = metricsOf().size < 2;
    const best = (key, sign) => { const known = runs.filter(run => run && isNumber(run[key])).map(run => sign * run[key]); return known.length > 1 ? sign * Math.max(...known) : null; };
    figures.replaceChildren(sideways(rows.map(([name, text, key, sign]) => {
      // Of errors in numbers, less is better.
      const towards = key === "score" && runs.some(run => run && /error|mae/i.test(run.metric || "")) ? -1 : sign;
      const top = key && (isOneTask || !["score", "loss"].includes(key)) ? best(key, towards) : null;
      return [name, runs.map(run => (run ? (top !== null && run[key] === top ? h("b", {}, text(run)) : text(run)) : "removed"))];
    })));
    recipes.replaceChildren(found.differences.length ? sideways(found.differences.map(row => [h("code", {}, row.key), ids.map(id => (found.ids.includes(id) ? literal(row.values[found.ids.indexOf(id)]) : "–"))])) : h("p", { class: "quiet" }, ids.length > 1 ? "The recipes are equal." : "Choose another run to compare with."));
  }
  const sideways = rows => h("table", { class: "plain compare" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), ids.map(id => h("th", { scope: "col" }, label(id))))),
    h("tbody", {}, rows.map(([name, cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map(cell => h("td", {}, cell))))));

  async function refresh() {
    const now = ids.map(id => { const run = state.runs.get(id); return run && `${run.epochs_trained} ${run.status} ${run.date}`; }).join();
    if (now === seen) return;
    seen = now;
    try {
      const present = ids.filter(id => state.runs.has(id));
      found = { ids: present, ...(await get("compare", { run: present })) };
    } catch (error) {
      recipes.replaceChildren(h("p", { class: "stopped" }, error.message));
      return;
    }
    tables();
    draw();
  }
  const stop = onRuns(soon(() => { tables(); refresh(); }));
  tables();
  draw();
  refresh();
  return { keys: { Escape: back }, close: () => { stop(); Object.values(charts).forEach(chart => chart.close()); } };
}
