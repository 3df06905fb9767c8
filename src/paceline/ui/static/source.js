// Where the answers come from: a server that is asked, or the page itself (a report).

const inlined = document.getElementById("answers");
const answers = inlined ? JSON.parse(inlined.textContent) : null;

export const isReport = answers !== null;
export const about = answers ? answers.about : null; // when a report was written, and of what

/** Return the answer to a path such as `api/runs`. Throws an Error with the server's message. */
export async function get(path) {
  if (!answers) return ask(path, {});
  if (answers[path] === undefined) throw new Error("This report doesn't include that.");
  return answers[path];
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
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(answer.error || `The server returned status ${response.status}.`), { status: response.status });
  return answer;
}

let watcher = () => {};

/** Tell `listener` whether the connection for changes is up. */
export function onLive(listener) {
  watcher = listener;
}

/** Call listeners by event name as things change; returns a function that ends it. */
export function follow(path, listeners) {
  const events = new EventSource(path);
  for (const [name, listener] of Object.entries(listeners)) {
    events.addEventListener(name, (event) => listener(JSON.parse(event.data)));
  }
  events.addEventListener("open", () => watcher(true));
  events.addEventListener("error", () => watcher(false));
  return () => events.close();
}
