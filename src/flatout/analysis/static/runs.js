// The table of all runs.

import { count, date, devices, duration, figure, h, isNumber, message, meter, score, soon, svg, visible } from "./dom.js";
import { onRuns, state } from "./net.js";

const ROW = 48;
const ATTENTION = new Set(["failed", "incomplete", "broken", "stopped"]);
export const chosen = new Set();
// What was looked for stays when one comes back to the table.
const view = { text: "", status: "all", job: "", model: "", key: "date", down: true, scroll: 0, at: 0 };

const isShare = run => /accuracy|precision|map|f1/i.test(run.metric || "");
const COLUMNS = [
  { key: "name", title: "Run", cell: run => [h("b", {}, run.name), h("small", {}, subtitle(run))] },
  { key: "status", title: "Status", cell: run => status(run) },
  { key: "model", title: "Model", cell: run => [h("span", {}, run.model || "–"), h("small", {}, run.job || "")] },
  { key: "score", title: "Result", number: true, cell: run => result(run) },
  { key: "spark", title: "Curve", unsorted: true, cell: run => spark(run.spark) },
  { key: "loss", title: "Loss", number: true, cell: run => figure(run.loss) },
  { key: "epochs_trained", title: "Epochs", number: true, cell: run => epochs(run) },
  { key: "images_per_second", title: "Images/s", number: true, cell: run => count(run.images_per_second) },
  { key: "train_seconds", title: "Time", number: true, cell: run => duration(run.train_seconds) },
  { key: "devices", title: "Devices", cell: run => devices(run.devices) || "–" },
  { key: "date", title: "Date", number: true, cell: run => date(run.date) },
];

const subtitle = run => (run.id === "." || run.id === run.name ? run.note || "" : run.id);

export function status(run) {
  const problem = run.problems && run.problems.length ? run.problems.join(" ") : run.note || "";
  const label = h("span", { class: `status is-${run.status}`, title: problem || null }, run.status);
  if (run.problems?.length && run.status !== "broken" && run.status !== "incomplete")
    label.append(h("abbr", { class: "flag", title: problem, "aria-label": problem }, "!"));
  return label;
}

function result(run) {
  if (!isNumber(run.score)) return h("span", { class: "quiet" }, "–");
  const text = isShare(run) ? score(run.score) : figure(run.score);
  const of = `${run.split === "valid" ? "validation" : run.split} ${run.metric}`;
  const number = h("b", { title: of }, text);
  return isShare(run) ? [meter(run.score), number] : [number, h("small", { title: run.metric }, run.metric)];
}

function epochs(run) {
  if (!isNumber(run.epochs_trained)) return "–";
  if (!run.epochs_trained && run.status === "finished") return `${run.epochs ?? "–"}`; // a cross-validation: its folds have the lines
  return run.epochs && run.epochs !== run.epochs_trained ? `${run.epochs_trained} / ${run.epochs}` : `${run.epochs_trained}`;
}

function spark(values) {
  if (!values || values.length < 2) return "";
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, i) => `${((i / (values.length - 1)) * 76 + 2).toFixed(1)},${(22 - ((value - low) / span) * 20).toFixed(1)}`);
  const [x, y] = points.at(-1).split(",");
  return svg("svg", { class: "spark", viewBox: "0 0 80 24", "aria-hidden": "true" },
    svg("polyline", { points: points.join(" ") }), svg("circle", { cx: x, cy: y, r: 2 }));
}

function wanted() {
  const words = view.text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...state.runs.values()].filter(run => {
    if (view.status === "attention" ? !ATTENTION.has(run.status) && !run.problems?.length : view.status !== "all" && run.status !== view.status) return false;
    if ((view.job && run.job !== view.job) || (view.model && run.model !== view.model)) return false;
    const text = `${run.id} ${run.name} ${run.job} ${run.model} ${run.status} ${run.note || ""} ${devices(run.devices)}`.toLowerCase();
    return words.every(word => text.includes(word));
  });
  const value = run => (view.key === "devices" ? devices(run.devices) : run[view.key]);
  return rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const missing = v => v === null || v === undefined || v === "";
    if (missing(x) || missing(y)) return missing(x) - missing(y) || a.id.localeCompare(b.id);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return (view.down ? -order : order) || a.id.localeCompare(b.id);
  });
}

export function runsView(main) {
  let rows = [];
  const search = h("input", { type: "search", placeholder: "Search runs  /", "aria-label": "Search runs", value: view.text,
    oninput: event => { view.text = event.target.value; view.at = 0; update(); } });
  const pick = (key, title) => h("select", { "aria-label": title, onchange: event => { view[key] = event.target.value; update(); } });
  const jobs = pick("job", "Job"), models = pick("model", "Model");
  const states = h("div", { class: "segments", role: "group", "aria-label": "Status" },
    [["all", "All"], ["running", "Running"], ["finished", "Finished"], ["attention", "Attention"]].map(([key, title]) =>
      h("button", { "data-status": key, onclick: () => { view.status = key; update(); } }, title, h("i", {}))));
  const compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const total = h("p", { class: "quiet total", role: "status" });
  const heads = COLUMNS.map(column => h("th", { class: [column.number && "number", `c-${column.key}`].filter(Boolean).join(" "), scope: "col" },
    column.unsorted ? column.title : h("button", { onclick: () => sort(column) }, column.title)));
  const body = h("tbody", {});
  const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th", { class: "c-pick", scope: "col" }, h("span", { class: "hidden" }, "Choose")), heads)), body);
  const empty = h("div", {});
  main.replaceChildren(
    h("div", { class: "title" }, h("h1", {}, "Runs"), total),
    h("div", { class: "tools" }, search, states, jobs, models, compare),
    h("div", { id: "notes" }), table, empty);

  function sort(column) {
    const first = ["name", "status", "model", "devices", "loss"].includes(column.key);
    [view.down, view.key] = [view.key === column.key ? !view.down : !first, column.key];
    update();
  }

  function options(select, key, title) {
    const names = [...new Set([...state.runs.values()].map(run => run[key]).filter(Boolean))].sort();
    const now = JSON.stringify(names);
    if (select.dataset.names !== now) {
      select.dataset.names = now;
      select.replaceChildren(h("option", { value: "" }, title), ...names.map(name => h("option", { value: name }, name)));
    }
    select.value = view[key];
  }

  function draw() {
    const [first, last] = visible(body, ROW, rows.length);
    const space = height => h("tr", { class: "space", "aria-hidden": "true" }, h("td", { style: { height: `${height}px` } }));
    const focused = document.activeElement?.closest?.("tr[data-id]")?.dataset.id;
    const lines = rows.slice(first, last).map((run, i) => line(run, first + i));
    const parts = [...(first ? [space(first * ROW)] : []), ...lines, ...(last < rows.length ? [space((rows.length - last) * ROW)] : [])];
    parts.forEach((part, i) => renew(body.rows[i], part));
    while (body.rows.length > parts.length) body.lastElementChild.remove();
    if (focused) [...body.rows].find(row => row.dataset.id === focused)?.focus({ preventScroll: true });
  }

  // A run's row stays, and only cells that differ are replaced: a click counts if it ends on the row that it began on.
  function renew(row, part) {
    if (!row) return body.append(part);
    if (!part.dataset.id || row.dataset.id !== part.dataset.id) return row.replaceWith(part);
    for (const { name, value } of part.attributes) row.setAttribute(name, value);
    [...part.cells].forEach((cell, i) => { if (!row.cells[i].isEqualNode(cell)) row.cells[i].replaceWith(cell); });
    row.querySelector("input").checked = chosen.has(part.dataset.id);
  }

  function line(run, index) {
    const box = h("input", { type: "checkbox", tabindex: -1, "aria-label": `Choose ${run.name}`, checked: chosen.has(run.id),
      onclick: event => event.stopPropagation(), onchange: () => toggle(run) });
    return h("tr", { "data-id": run.id, "data-index": index, tabindex: index === view.at ? 0 : -1, "aria-rowindex": index + 2,
      onclick: () => open(run), onfocus: event => { view.at = Number(event.currentTarget.dataset.index); } },
      h("td", { class: "c-pick" }, h("label", { onclick: event => event.stopPropagation() }, box)),
      COLUMNS.map(column => h("td", { class: [column.number && "number", `c-${column.key}`].filter(Boolean).join(" ") },
        column.key === "name" ? h("a", { href: `#/run/${encodeURIComponent(run.id)}`, tabindex: -1, onclick: event => event.stopPropagation() }, column.cell(run)) : column.cell(run))));
  }

  const open = run => { location.hash = `#/run/${encodeURIComponent(run.id)}`; };
  function toggle(run) {
    chosen.has(run.id) ? chosen.delete(run.id) : chosen.add(run.id);
    update();
  }

  function update() {
    rows = wanted();
    view.at = Math.min(view.at, Math.max(0, rows.length - 1));
    const all = [...state.runs.values()];
    const number = { all: all.length, running: 0, finished: 0, attention: 0 };
    for (const run of all) {
      if (run.status in number) number[run.status] += 1;
      if (ATTENTION.has(run.status) || run.problems?.length) number.attention += 1;
    }
    for (const button of states.children) {
      button.setAttribute("aria-pressed", button.dataset.status === view.status);
      button.lastChild.textContent = number[button.dataset.status].toLocaleString("en");
    }
    options(jobs, "job", "All jobs");
    options(models, "model", "All models");
    total.textContent = (rows.length === all.length ? "" : `${count(rows.length)} of `) + `${count(all.length)} in ${state.folder}`;
    document.getElementById("notes").replaceChildren(...state.notes.map(note => h("p", { class: "stopped" }, note)));
    COLUMNS.forEach((column, i) => heads[i].setAttribute("aria-sort", column.key !== view.key ? "none" : view.down ? "descending" : "ascending"));
    for (const id of chosen) if (!state.runs.has(id)) chosen.delete(id);
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    compare.classList.toggle("off", chosen.size < 2);
    compare.href = chosen.size ? `#/compare/${[...chosen].map(encodeURIComponent).join("/")}` : "#/compare";
    table.setAttribute("aria-rowcount", rows.length + 1);
    table.hidden = !rows.length;
    empty.replaceChildren(...(rows.length ? [] : [nothing(all.length)]));
    draw();
  }

  function nothing(all) {
    if (all) return message("No run matches", "Change the search or the filters above.");
    const first = state.exists ? "There are no runs in this folder yet." : "This folder does not exist yet.";
    return h("div", { class: "empty" }, h("h2", {}, "No runs"), h("p", {}, first, " They appear here as soon as one starts, for example with"),
      h("pre", {}, `flatout train digits --out "${state.folder}/first"`));
  }

  function move(step) {
    const at = view.at = Math.min(rows.length - 1, Math.max(0, view.at + step));
    const top = body.getBoundingClientRect().top + at * ROW;
    if (top < 120 || top + ROW > window.innerHeight) window.scrollBy(0, top < 120 ? top - 120 : top + ROW - window.innerHeight + 12);
    draw(); // it gives the focus back to the row that had it
    body.querySelector(`tr[data-index="${at}"]`)?.focus({ preventScroll: true });
  }

  const keys = { "/": () => search.focus(), ArrowDown: () => move(1), ArrowUp: () => move(-1), j: () => move(1), k: () => move(-1),
    PageDown: () => move(10), PageUp: () => move(-10), Home: () => move(-rows.length), End: () => move(rows.length),
    Enter: () => rows[view.at] && open(rows[view.at]), x: () => rows[view.at] && toggle(rows[view.at]),
    c: () => { if (chosen.size > 1) location.hash = compare.getAttribute("href"); },
    Escape: () => { search.value = view.text = ""; update(); } };

  const scrolled = soon(draw);
  addEventListener("scroll", scrolled, { passive: true });
  addEventListener("resize", scrolled);
  const stop = onRuns(soon(update));
  update();
  window.scrollTo(0, view.scroll);
  return { keys, close: () => { view.scroll = window.scrollY; stop(); removeEventListener("scroll", scrolled); removeEventListener("resize", scrolled); } };
}
