// Where the answers come from: a server that is asked, or the page itself (a report).

import { setClock } from "./format.js";

const inlined = document.getElementById("answers");
const answers = inlined ? JSON.parse(inlined.textContent) : null;

export const isReport = answers !== null;
export const about = answers ? answers.about : null; // when a report was written, and of what
if (about) setClock({ now: about.now ?? about.time, runs: false });

/** Return the answer to a path such as `api/runs`. Throws an Error with the server's message. */
export async function get(path) {
  if (answers) {
    const found = answers[path] ?? answers[path.split("?")[0]];
    if (found === undefined) throw new Error("This report doesn't include that.");
    return found;
  }
  return ask(path, {});
}

/** Ask the server to act on a run. */
export async function act(key, verb) {
  return ask(`api/runs/${encodeURIComponent(key)}/${verb}`, { method: "POST" });
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new Error("The server isn't responding. Check that `paceline ui` is still running.");
  }
  const clock = response.headers.get("x-paceline-clock");
  if (clock) setClock(JSON.parse(clock));
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(answer.error || `The server returned status ${response.status}.`), { status: response.status });
  return answer;
}

/** Call listeners by event name as things change; returns a function that ends it. A report doesn't change. */
export function follow(path, listeners) {
  if (answers) return () => {};
  const events = new EventSource(path);
  for (const [name, listener] of Object.entries({ clock: setClock, ...listeners })) {
    events.addEventListener(name, (event) => {
      if (event.data) listener(JSON.parse(event.data));
    });
  }
  events.addEventListener("open", () => setLive(true));
  events.addEventListener("error", () => setLive(false));
  return () => events.close();
}

let watcher = () => {};

/** Tell `listener` whether the connection for changes is up. */
export function onLive(listener) {
  watcher = listener;
}

function setLive(isLive) {
  watcher(isLive);
}
