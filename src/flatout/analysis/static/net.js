// Requests, and one stream of changes for each page.

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

export const state = { runs: new Map(), charts: [], notes: [], folder: "", version: 0, complete: false, exists: true };
const listeners = new Set();
export const onRuns = listener => { listeners.add(listener); return () => listeners.delete(listener); };

function take(changes) {
  state.version = changes.version;
  if (changes.is_whole) state.runs.clear();
  for (const key of ["complete", "exists", "notes", "charts", "folder"]) if (key in changes) state[key] = changes[key];
  for (const run of changes.runs) state.runs.set(run.id, run);
  for (const id of changes.removed) state.runs.delete(id);
  for (const listener of [...listeners]) listener();
}

export async function load() {
  take(await get("runs"));
}

let source = null, watched = null;

/** Opens the stream: changes of all runs, and of the files of one of them, which `news` gets. */
export function listen(run = null, news = null, log = null) {
  watched = { run, news, log };
  if (source) source.close();
  if (document.hidden) return;
  source = new EventSource(address("events", { since: state.version, run, log }));
  const link = document.getElementById("link");
  source.onopen = () => show("live", "live");
  source.onerror = () => show("lost", "no connection");
  source.addEventListener("runs", event => take(JSON.parse(event.data)));
  source.addEventListener("run", event => news && news(JSON.parse(event.data)));
  function show(kind, text) { link.className = `link ${kind}`; link.textContent = text; }
}

// A page that nobody sees takes nothing from the server, nor one of the few connections of a browser.
document.addEventListener("visibilitychange", () => {
  if (!watched) return;
  if (document.hidden) source?.close();
  else listen(watched.run, watched.news, watched.log);
});
