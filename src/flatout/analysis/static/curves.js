// Charts over epochs, drawn by uPlot in the colours of the page.

import { figure, h } from "./dom.js";
import uPlot from "./uplot/uPlot.esm.js";

const HEIGHT = 230;
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const charts = new Set();
// Short curves show their points; a single one would be invisible without.
const areMarked = one => one.x.length === 1 || (one.points ?? one.x.length <= 12);
// The colours of a canvas do not follow the page by themselves.
theme.watch(() => charts.forEach(chart => chart.redraw()));

/**
 * A chart with a title. `update` takes [{label, colour, dash, points, x, y, width}]: x and y are arrays of one length.
 * Its height is fixed, so nothing moves when values arrive.
 */
export class Chart {
  constructor(title, { format = figure, unit = "epoch", share = false, zero = false, spiky = false } = {}) {
    this.format = format;
    this.unit = unit;
    this.zero = zero;
    this.share = share;
    this.spiky = spiky;
    this.series = [];
    this.plot = null;
    this.space = h("div", { class: "plot", style: { minHeight: `${HEIGHT + 34}px` } });
    this.caption = h("figcaption", {}, title);
    this.element = h("figure", { class: "curve", role: "img", "aria-label": title }, this.caption, this.space);
    this.title = title;
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.space);
    charts.add(this);
  }

  update(series) {
    const had = this.series.map(one => one.label).join("|");
    this.series = series.filter(one => one.x.length);
    const last = this.series.map(one => `${one.label} ${this.format(lastOf(one.y))}`).join(", ");
    this.element.setAttribute("aria-label", `${this.title}: ${last || "no values"}`);
    const log = this.spike();
    if (this.plot && log === this.log && had === this.series.map(one => one.label).join("|")) {
      this.dress();
      this.plot.setData(this.data());
    } else this.redraw();
  }

  /** Whether one spike would flatten the rest of a linear axis. */
  spike() {
    const values = this.share ? [] : this.series.flatMap(one => one.y).filter(value => typeof value === "number");
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), 0);
    return this.spiky && low > 0 && high > LOG_FROM_RATIO * low;
  }

  data() {
    if (!this.series.length) return [[]];
    return uPlot.join(this.series.map(one => [one.x, one.y]));
  }

  dress() {
    // Points only where there are few; of a plot that exists, uPlot wants a function.
    this.series.forEach((one, i) => { this.plot.series[i + 1].points.show = () => areMarked(one); });
  }

  redraw() {
    this.plot?.destroy();
    this.plot = null;
    this.log = this.spike();
    if (!this.series.length) {
      this.space.replaceChildren(h("p", { class: "quiet waiting" }, "No values yet"));
      return;
    }
    this.space.replaceChildren();
    const muted = colour("muted"), line = colour("line");
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const text = this.format;
    this.plot = new uPlot({
      width: this.space.clientWidth || 300,
      height: HEIGHT,
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, grid: { show: false }, space: 44, size: 30, incrs: (_, axis_, low, high) => (high - low < 2 ? EPOCHS : EPOCHS.filter(step => step >= 1)), values: (_, ticks) => ticks.map(tick => Number(tick.toFixed(2))) },
        this.log
          ? { ...axis, size: 56, splits: (_, axis_, low, high) => powers(low, high), filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map(tick => tick.toLocaleString("en", { maximumSignificantDigits: 2 })) }
          : { ...axis, size: 56, space: 34, values: (_, ticks, axis_, space, step) => ticks.map(tick => short(tick, step)) },
      ],
      legend: { markers: { width: 0, fill: (plot, i) => plot.series[i].stroke?.() || "transparent" } },
      series: [
        { label: this.unit, value: (_, x) => (x === null ? "–" : Number.isInteger(x) ? x : x.toFixed(2)) },
        ...this.series.map(one => ({
          label: one.label, stroke: one.raw || colour(one.colour || "valid"), width: one.width || 1.6, dash: one.dash, spanGaps: true,
          points: { show: areMarked(one), size: 5, fill: colour("paper") },
          value: (plot, value, series, index) => text(value ?? (index === null ? lastOf(plot.data[series]) : near(plot.data[series], index))),
        })),
      ],
    }, this.data(), this.space);
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.log) return [low / 1.3, high * 1.3];
    // An axis of less than this makes noise look like a trend.
    const least = this.share ? 0.1 : 0.25 * Math.abs(high) || 1;
    const missing = Math.max(0, least - (high - low)) / 2, margin = 0.06 * Math.max(high - low, least);
    let [bottom, top] = [low - missing - margin, high + missing + margin];
    if (this.zero || (low >= 0 && bottom < 0)) bottom = 0;
    if (this.share && high <= 1 && top > 1) top = 1.005;
    return [bottom, top];
  }

  resize() {
    if (this.plot && this.space.clientWidth) this.plot.setSize({ width: this.space.clientWidth, height: HEIGHT });
  }

  close() {
    charts.delete(this);
    this.sizes.disconnect();
    this.plot?.destroy();
  }
}

const lastOf = values => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i]; return null; };
const near = (values, index) => { for (let i = index; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i]; return null; };
// As in the report.
const LOG_FROM_RATIO = 50;
const EPOCHS = [0.1, 0.2, 0.5, ...[1, 10, 100, 1000, 10000].flatMap(ten => [ten, 2 * ten, 5 * ten])];
/** The powers of ten from low to high. */
function powers(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(`1e${first + i}`));
}
/** A tick with as many decimals as the step between ticks has. */
function short(value, step) {
  if (step >= 1000) return value ? `${value / 1000}k` : "0";
  if (step < 1e-5) return value ? value.toExponential(1) : "0";
  return value.toLocaleString("en", { minimumFractionDigits: decimals(step), maximumFractionDigits: decimals(step) });
}
const decimals = step => (String(Number(step.toPrecision(6))).split(".")[1] || "").length;

/** One line of a metric by epoch, without the epochs that have none. */
export function course(lines, key, label, style, scale = 1) {
  const known = lines.filter(line => typeof line[key] === "number");
  return { label, x: known.map(line => line.epoch), y: known.map(line => line[key] * scale), ...style };
}

export const SPLITS = {
  train: { colour: "train" },
  valid: { colour: "valid", width: 2 },
  test: { colour: "test", dash: [6, 3], width: 2 },
};

/** The charts of one run: fixed from the start, so that nothing moves. */
export class RunCurves {
  constructor() {
    this.charts = {
      loss: new Chart("Loss", { spiky: true }),
      metric: new Chart("Result", { share: true, spiky: true }),
      rate: new Chart("Images per second"),
      learning: new Chart("Learning rate"),
      busy: new Chart("Use of the machine by process 0, %", { zero: true }),
      memory: new Chart("Memory of process 0, GiB", { zero: true }),
    };
    this.element = h("div", { class: "curves" }, Object.values(this.charts).map(chart => chart.element));
    this.lines = [];
    this.live = [];
  }

  /** Names the main metric of the task, such as accuracy. */
  name(metric, key, step) {
    [this.key, this.step] = [key, step];
    this.charts.metric.caption.textContent = this.charts.metric.title = metric;
    this.charts.metric.share = /accuracy|map|precision/i.test(metric);
  }

  setLive(lines) {
    this.live = [];
    for (const line of lines) {
      // A run that was resumed goes on from an earlier step.
      while (this.live.length && this.live.at(-1).epoch >= line.epoch) this.live.pop();
      this.live.push(line);
    }
  }

  draw() {
    const { lines, live, charts } = this;
    const splits = quantity => Object.entries(SPLITS).map(([split, style]) => course(lines, `${split}_${quantity}`, split, style));
    charts.loss.update([course(live, "loss", "within epochs", { colour: "train", width: 1, points: false }), ...splits("loss")]);
    const metric = splits(this.key);
    if (this.step && this.step !== this.key) metric[0] = course(lines, `train_${this.step}`, `train ${this.step.replaceAll("_", " ")}`, SPLITS.train);
    charts.metric.update(metric);
    charts.rate.update([
      course(live, "images_per_second", "within epochs", { colour: "train", width: 1, points: false }),
      course(lines, "images_per_second", "whole epochs", { colour: "valid", width: 2 }),
    ]);
    charts.learning.update([course(lines, "learning_rate", "learning rate", { colour: "valid" })]);
    charts.busy.update([
      course(live, "cpu_percent", "CPU, 100 for each core", { colour: "valid", points: false }),
      course(live, "wait_fraction", "waiting for images", { colour: "test", points: false }, 100),
    ]);
    charts.memory.update([
      course(live, "rss_bytes", "host", { colour: "valid", points: false }, 2 ** -30),
      course(live, "device_bytes", "device, most", { colour: "test", points: false }, 2 ** -30),
    ]);
    for (const name of ["busy", "memory"]) charts[name].element.hidden = !live.length && !this.isRunning;
    charts.learning.element.hidden = new Set(lines.map(line => line.learning_rate)).size < 2;
  }

  close() { Object.values(this.charts).forEach(chart => chart.close()); }
}
