// Elements, numbers for people, and lists of which only the visible part exists.

/** Makes an element. All text goes in as text: names from data cannot become markup. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-") && value !== null) { element.setAttribute(name, value); continue; }
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "indeterminate") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const isNumber = value => typeof value === "number" && Number.isFinite(value);
export const count = value => (isNumber(value) ? Math.round(value).toLocaleString("en") : "–");
export const score = (value, digits = 4) => (isNumber(value) ? value.toFixed(digits) : "–");
export const percent = value => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–");

/** A number of any size with four digits. */
export function figure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size && size < 0.001) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** As `flatout.console.duration` writes times. */
export function duration(seconds) {
  if (!isNumber(seconds) || !seconds) return "–";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = number => String(number).padStart(2, "0");
  if (whole < 100) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

export function bytes(value) {
  if (!isNumber(value) || !value) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

export function date(seconds) {
  const when = new Date(1000 * seconds);
  const two = number => String(number).padStart(2, "0");
  const time = `${two(when.getHours())}:${two(when.getMinutes())}`;
  if (when.toDateString() === new Date().toDateString()) return `today ${time}`;
  return `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${time}`;
}

/** Values of a recipe as a recipe writes them; of long ones the beginning. */
export function literal(value) {
  const text = value === null || value === undefined ? "–" : typeof value === "string" ? value || '""' : JSON.stringify(value);
  return text.length > 80 ? h("span", { title: text }, `${text.slice(0, 78)} …`) : text;
}

export const devices = value => (Array.isArray(value) ? groups(value) : String(value || ""));
function groups(names) {
  const times = new Map();
  for (const name of names) times.set(name, (times.get(name) || 0) + 1);
  return [...times].map(([name, n]) => (n > 1 ? `${n} × ${name}` : name)).join(", ");
}

export function meter(share, kind = "") {
  const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
  return h("span", { class: `meter ${kind}`, "aria-hidden": "true" }, h("i", { style: { width } }));
}

/** Calls `draw` once before the next frame, however often it was asked. */
export function soon(draw) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; draw(); });
  };
}

/**
 * Which items of a long list of equal rows can be seen in the window: first and one past the last, whole rows, with
 * some above and below.
 */
export function visible(element, rowHeight, rows, more = 8) {
  const top = -element.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(top / rowHeight) - more);
  const last = Math.min(rows, Math.ceil((top + window.innerHeight) / rowHeight) + more);
  return [Math.min(first, rows), Math.max(last, Math.min(first, rows))];
}

export function message(title, ...text) {
  return h("div", { class: "empty" }, h("h2", {}, title), ...text.map(part => h("p", {}, part)));
}
