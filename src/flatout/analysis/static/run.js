// The page of one run.

import { bytes, count, date, devices, duration, figure, h, isNumber, message, percent, score, soon } from "./dom.js";
import { address, get, listen, onRuns, state } from "./net.js";
import { RunCurves } from "./curves.js";
import { status } from "./runs.js";

const TABS = [["curves", "Curves"], ["recipe", "Recipe"], ["log", "Log"]];
const LOG_LINES = 2000;

export function runView(main, id, tab = "curves") {
  const abort = new AbortController();
  const head = h("div", { class: "run-head" }), panel = h("div", { class: "panel", role: "tabpanel" });
  const tabs = h("div", { class: "tabs", role: "tablist" }, TABS.map(([name, title]) =>
    h("button", { role: "tab", id: `tab-${name}`, "data-tab": name, onclick: () => open(name) }, title)));
  const curves = new RunCurves();
  const log = { lines: [], box: h("pre", { class: "log", tabindex: 0, "aria-label": "Log" }) };
  let details = null, opened = "";
  const address_ = name => `#/run/${encodeURIComponent(id)}/${name}`;
  const draw = soon(() => { header(); if (opened === "curves") curves.draw(); });

  if (!state.runs.has(id)) {
    main.replaceChildren(message("There is no such run", `${id} is not, or no longer, in ${state.folder}.`), h("p", {}, h("a", { href: "#/" }, "All runs")));
    listen();
    return { keys: { Escape: back }, close: curves.close.bind(curves) };
  }
  document.title = `${state.runs.get(id).name} · flatout board`;
  main.replaceChildren(head, tabs, panel);
  header();
  open(TABS.some(([name]) => name === tab) ? tab : "curves");
  listen(id, news);
  refresh();
  const stop = onRuns(() => { draw(); refresh(); });

  function back() { location.hash = "#/"; }

  async function refresh() {
    const run = state.runs.get(id);
    const key = run && `${run.status} ${run.date} ${run.problems?.join()}`;
    if (!run || key === refresh.key) return;
    refresh.key = key;
    try {
      details = await get("run", { run: id }, { signal: abort.signal });
    } catch (error) {
      if (error.name !== "AbortError") details = { error: error.message, figures: {}, recipe: "" };
    }
    draw();
    if (opened === "recipe") open(opened, true);
  }

  function news(found) {
    if (found.metrics) curves.lines = found.metrics;
    if (found.live) curves.setLive(found.live);
    if (found.log) {
      log.lines = found.log.slice(-LOG_LINES);
      if (opened === "log") drawLog();
    }
    draw();
  }

  function header() {
    const run = state.runs.get(id);
    if (!run) { head.replaceChildren(message("This run has been removed")); return; }
    curves.isRunning = run.status === "running";
    const metric = run.metric || "result";
    const key = Object.keys(curves.lines.at(-1) || {}).map(name => name.match(/^(?:valid|test)_(accuracy|map|mae)$/)?.[1]).find(Boolean);
    const step = Object.keys(curves.lines.at(-1) || {}).map(name => name.match(/^train_(?!loss)(.+)$/)?.[1]).find(Boolean);
    curves.name(metric[0].toUpperCase() + metric.slice(1), key || step || "accuracy", step);
    const figures = details?.figures || {};
    const split = run.folds ? "held-out" : run.split === "valid" ? "validation" : run.split || "test";
    const facts = [
      run.folds ? ["folds × epochs", `${count(run.folds)} × ${count(run.epochs)}`] : [run.epochs === 1 ? "epoch" : "epochs", run.epochs && run.epochs_trained !== run.epochs ? `${count(run.epochs_trained)} of ${count(run.epochs)}` : count(run.epochs_trained)],
      ["images per second", count(run.images_per_second)],
      ["training time", duration(run.train_seconds)],
      [`${split} loss`, figure(run.loss)],
      ["parameters", count(run.parameters)],
      ["devices", devices(run.devices) || "–"],
      ["waiting for images", percent(figures.input_wait_fraction)],
      ["most memory, host", bytes(figures.peak_rss_bytes)],
      ["most memory, device", bytes(figures.peak_device_bytes)],
    ].slice(0, /^$|cpu/.test(devices(run.devices)) ? -1 : undefined).filter(([, value]) => value !== "–" || run.status === "running" || !details);
    const isShare = /accuracy|map|precision/i.test(metric);
    const big = isNumber(run.score) ? (isShare ? score(run.score) : figure(run.score)) : "–";
    head.replaceChildren(
      h("a", { class: "back", href: "#/" }, "All runs"),
      h("div", { class: "title" }, h("h1", {}, run.name, " ", h("span", { class: "quiet" }, [run.job, run.model].filter((part, i, all) => part && all.indexOf(part) === i).join(" · "))), status(run),
        details?.report ? h("a", { class: "button", href: address("report", { run: id }), target: "_blank", rel: "noopener" }, "Report") : null),
      ...(run.problems || []).map(text => h("p", { class: "stopped" }, text)),
      ...(run.note ? [h("p", { class: "stopped" }, run.note)] : []),
      ...(run.status === "running" ? [progress(run)] : []),
      h("div", { class: "result" },
        h("div", {}, h("div", { class: `big${big.length > 6 ? " long" : ""}` }, big), isNumber(run.score) ? `${split} ${metric}` : run.status === "running" ? "no result yet" : "no result",
          h("br", {}), h("span", { class: "quiet" }, isNumber(figures[`${run.split}_count`]) ? `${count(figures[`${run.split}_count`])} images · ` : "", date(run.date))),
        h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))));
  }

  function progress(run) {
    if (run.epochs === 0) return h("p", { class: "quiet" }, "Computing the features of the images and fitting the head.");
    const live = curves.live.at(-1);
    const done = Math.max(live ? live.epoch : 0, run.epochs_trained || 0), all = run.epochs || 1;
    const first = curves.live[0];
    const speed = first && live && live.time > first.time ? (live.epoch - first.epoch) / (live.time - first.time) : 0;
    const left = speed > 0 ? `${duration((all - done) / speed)} left` : "";
    return h("div", { class: "progress" }, h("progress", { max: all, value: done, "aria-label": "Progress" }),
      h("span", {}, `epoch ${Math.min(all, Math.floor(done) + 1)} of ${all}`, left ? ` · ${left}` : "", live && isNumber(live.loss) ? ` · loss ${figure(live.loss)}` : ""));
  }

  function open(name, again = false) {
    if (name === opened && !again) return;
    if (!again) history.replaceState(null, "", address_(name));
    opened = name;
    for (const button of tabs.children) {
      button.setAttribute("aria-selected", button.dataset.tab === name);
      button.tabIndex = button.dataset.tab === name ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    if (name === "curves" && state.runs.get(id).folds) panel.replaceChildren(folds());
    else if (name === "curves" && state.runs.get(id).epochs === 0) panel.replaceChildren(h("p", { class: "quiet" }, "The head is fitted to the features of the images, without epochs: there are no curves."), verdict());
    else if (name === "curves") { panel.replaceChildren(curves.element, verdict()); curves.draw(); }
    if (name === "recipe") recipe();
    if (name === "log") { panel.replaceChildren(h("p", { class: "quiet" }, "The last lines of logs/rank-0.log, as they are written."), log.box); drawLog(); }
  }

  function folds() {
    const names = Array.from({ length: state.runs.get(id).folds }, (_, i) => (id === "." ? "" : `${id}/`) + `fold-${i + 1}`).filter(name => state.runs.has(name));
    return h("p", {}, "Each fold is a run with curves of its own: ", names.flatMap((name, i) => [i ? ", " : "", h("a", { href: `#/run/${encodeURIComponent(name)}` }, name)]),
      ". ", h("a", { href: `#/compare/${names.map(encodeURIComponent).join("/")}` }, "Compare them"), ".");
  }

  function verdict() {
    const box = h("section", { class: "verdict-box" });
    const fill = () => {
      const found = details?.figures || {};
      const items = [...(found.verdict || []), ...(found.notes || [])];
      box.replaceChildren(...(items.length ? [h("h2", {}, "Verdict and notes"), h("ul", { class: "verdict" }, items.map(text => h("li", {}, text)))] : []));
    };
    fill();
    verdict.stop?.();
    verdict.stop = onRuns(fill);
    setTimeout(fill, 300);
    return box;
  }

  function recipe() {
    if (!details) { panel.replaceChildren(h("p", { class: "quiet" }, "Reading …")); return; }
    panel.replaceChildren(
      h("div", { class: "tools" }, h("p", { class: "quiet" }, "Complete: ", h("code", {}, `flatout train ${details.folder}/recipe.toml`), " repeats the run.")),
      h("pre", { class: "recipe" }, (details.recipe || "There is no recipe.toml.").trim().split(/\n\n(?=\[)/).map(part => h("span", {}, `${part}\n\n`))));
  }

  function drawLog() {
    const isAtEnd = log.box.scrollHeight - log.box.scrollTop - log.box.clientHeight < 40 || !log.box.childElementCount;
    log.box.replaceChildren(...(log.lines.length ? log.lines.map(text => {
      const [, stamp, rest] = text.match(/^(\S+T\S+ rank \d+(?: \([^)]*\))?)  (.*)$/) || [null, "", text];
      return h("span", {}, stamp ? h("i", {}, stamp.replace(/^(\S+)T(\d\d:\d\d:\d\d)\S*/, "$2"), "  ") : null, `${rest}\n`);
    }) : ["The log is empty.\n"]));
    if (isAtEnd) log.box.scrollTop = log.box.scrollHeight;
  }

  const keys = { Escape: back, ArrowRight: () => step(1), ArrowLeft: () => step(-1) };
  TABS.forEach(([name], i) => { keys[String(i + 1)] = () => open(name); });
  function step(by) {
    const at = TABS.findIndex(([name]) => name === opened);
    const next = TABS[(at + by + TABS.length) % TABS.length][0];
    open(next);
    document.getElementById(`tab-${next}`).focus();
  }
  return { keys, close: () => { abort.abort(); stop(); verdict.stop?.(); curves.close(); } };
}
