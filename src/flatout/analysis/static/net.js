// Requests; and the changes of all runs, once a second.

const query = values => {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(values))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== undefined && one !== "") search.append(name, one);
  return search.toString();
};

export const address = (path, values = {}) => `api/${path}?${query(values)}`;

/** Answers of the server as values; its message as an Error. */
export async function get(path, values = {}, options = {}) {
  let response;
  try {
    response = await fetch(address(path, values), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The board does not answer: is `flatout board` still running?");
  }
  const isJson = (response.headers.get("content-type") || "").includes("json");
  const content = isJson ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(content.error || response.statusText);
  return content;
}

export const state = { runs: new Map(), notes: [], folder: "", version: "", exists: true };
const listeners = new Set();
export const onRuns = listener => { listeners.add(listener); return () => listeners.delete(listener); };

function take(found) {
  if (!("runs" in found)) return; // nothing has changed
  for (const key of ["version", "exists", "notes", "folder"]) state[key] = found[key];
  state.runs = new Map(found.runs.map(run => [run.id, run]));
  for (const listener of [...listeners]) listener();
}

export async function load() {
  take(await get("runs"));
}

let watched = {}, timer = 0;

/** Asks for changes of all runs, and of the files of one of them, which `news` gets. */
export function listen(run = null, news = null) {
  watched = { run, news, stamps: {} };
  poll();
}

async function poll() {
  // A page that nobody sees takes nothing from the server.
  if (document.hidden) return;
  const now = watched, link = document.getElementById("link");
  const show = (kind, text) => { link.className = `link ${kind}`; link.textContent = text; };
  try {
    take(await get("runs", { version: state.version }));
    if (state.runs.has(now.run)) {
      const found = await get("changes", { run: now.run, ...now.stamps });
      now.stamps = found.stamps;
      if (now === watched && Object.keys(found).length > 1) now.news(found);
    }
    show("live", "live");
  } catch {
    show("lost", "no connection");
  }
  if (now !== watched) return;
  clearTimeout(timer);
  timer = setTimeout(poll, 1000);
}

document.addEventListener("visibilitychange", poll);
