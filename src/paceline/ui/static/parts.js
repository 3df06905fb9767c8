// Small pieces that several pages show.

import { copy, h } from "./dom.js";
import { NOTHING, duration, percent, plain } from "./format.js";

const COLOURS = {
  running: "blue", ending: "blue", starting: "amber", queued: "amber", pending: "amber", held: "amber", submitted: "amber",
  done: "green", up: "green", down: "red", failed: "red", "out of memory": "red", "node failed": "red", "timed out": "red", lost: "violet",
  missing: "violet", preempted: "violet", stopped: "grey", cancelled: "grey", pruned: "grey",
};

/** The states in their order of importance, for lists and bars. */
export const STATES = ["running", "starting", "queued", "pending", "failed", "lost", "missing", "stopped", "cancelled", "pruned", "done"];

export function pill(state) {
  return h("span", { class: `pill ${COLOURS[state] || "grey"}` }, plain(state));
}

export function stateColour(state) {
  return `var(--${COLOURS[state] || "grey"})`;
}

export function tile(what, much, more = "") {
  return h("div", { class: "tile" }, h("div", { class: "what" }, what), h("div", { class: "much", title: much }, much), h("div", { class: "more", title: typeof more === "string" ? more : null }, more));
}

/** A bar of one or several parts: `[{share, colour, title}]`. */
export function bar(parts, kind = "") {
  return h(
    "div",
    { class: `bar ${kind}` },
    parts.filter((part) => part.share > 0).map((part) =>
      h("span", { title: part.title || null, style: { width: `${Math.min(100, 100 * part.share)}%`, background: part.colour || "var(--accent)" } }),
    ),
  );
}

/** How far a run is, in words and as a bar. */
export function progress(run) {
  if (run.step === null) return [h("span", { class: "quiet" }, NOTHING)];
  const share = run.total_steps ? run.step / run.total_steps : null;
  const left = !run.is_over && run.seconds_left !== null ? `${duration(run.seconds_left)} left` : "";
  const text = run.total_steps ? `${steps(run.step)} / ${steps(run.total_steps)}` : `step ${steps(run.step)}`;
  return [h("span", { class: "small both" }, h("span", null, text), h("span", { class: "quiet" }, left)), bar([{ share: share === null ? (run.is_over ? 1 : 0) : share, colour: stateColour(run.status) }])];
}

function steps(value) {
  return value >= 1e6 ? `${Number((value / 1e6).toPrecision(4))}M` : value.toLocaleString("en");
}

export function empty(title, text, command = "") {
  return h("div", { class: "empty" }, h("h2", null, title), h("p", null, text), command && h("pre", null, command));
}

/** A command with a button that copies it. */
export function command(text) {
  return h("div", { class: "command" }, h("code", null, plain(text)), h("button", { on: { click: () => copy(text) }, "aria-label": `Copy ${plain(text)}` }, "Copy"));
}

/** Buttons of which one is pressed: `choices` are [value, label] pairs. */
export function segments(label, choices, chosen, choose) {
  const host = h("div", { class: "segments", role: "group", "aria-label": label });
  for (const [each, text] of choices) {
    const press = () => {
      for (const button of host.children) button.setAttribute("aria-pressed", String(button.dataset.value === String(each)));
      choose(each);
    };
    host.append(h("button", { "aria-pressed": String(each === chosen), "data-value": each, on: { click: press } }, text));
  }
  return host;
}

/** Tabs with the keys that people expect: left, right, Home, End. */
export function tabs(choices, chosen, choose) {
  const host = h("div", { class: "tabs", role: "tablist" });
  const pick = (name, focus) => {
    for (const button of host.children) {
      const isChosen = button.dataset.name === name;
      button.setAttribute("aria-selected", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
      if (isChosen && focus) button.focus();
    }
    setTimeout(() => reveal(host)); // once it is in the page
    choose(name);
  };
  const names = choices.map(([name]) => name);
  const move = (event) => {
    const at = names.indexOf(event.target.dataset.name);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    pick(names[(to + names.length) % names.length], true);
  };
  for (const [name, text] of choices) {
    host.append(h("button", { role: "tab", "data-name": name, on: { click: () => pick(name, false), keydown: move } }, text));
  }
  pick(names.includes(chosen) ? chosen : names[0], false);
  return host;
}

/** Scroll tabs that are wider than the screen to the chosen one. */
function reveal(host) {
  const chosen = host.querySelector('[aria-selected="true"]');
  const left = chosen.offsetLeft - host.offsetLeft;
  host.scrollLeft = Math.min(left, Math.max(host.scrollLeft, left + chosen.offsetWidth - host.clientWidth));
}

/** A table that stays as it is. `titles` are [title, class] pairs; rows are lists of cells. */
export function plainTable(titles, rows) {
  const kinds = titles.map(([, kind]) => kind || null);
  return h("div", { class: "table" }, h("table", null,
    h("thead", null, h("tr", null, titles.map(([title], index) => h("th", { class: kinds[index], scope: "col" }, title)))),
    h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell, index) => h("td", { class: kinds[index] }, cell)))))));
}

/** Names and values, two columns. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, text]) => [h("dt", null, name), h("dd", null, text)]));
}

/** Where the time went: a bar and its legend. */
export function goodputBar(goodput) {
  const parts = Object.entries(goodput.seconds).filter(([, seconds]) => seconds > 0);
  if (!parts.length || !goodput.total) return h("p", { class: "quiet" }, "Nothing has been measured yet.");
  return h(
    "div",
    null,
    bar(parts.map(([name, seconds]) => ({ share: seconds / goodput.total, colour: timeColour(name), title: `${name} ${duration(seconds)}` })), "tall"),
    h("div", { class: "legend" }, parts.map(([name, seconds]) =>
      h("span", null, h("i", { style: { background: timeColour(name) } }), `${name} `, h("b", null, percent(seconds / goodput.total)), ` ${duration(seconds)}`),
    )),
  );
}

const TIMES = ["queued", "starting", "running", "training", "saving", "lost", "idle"];

export function timeColour(kind) {
  return `var(--g-${TIMES.includes(kind) ? kind : "idle"})`;
}
