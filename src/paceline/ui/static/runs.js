// The list of all runs.

import { h, later, put } from "./dom.js";
import { NOTHING, ago, compact, count, date, keyOf, number, percent, plain, titleOf } from "./format.js";
import { STATES, bar, empty, pill, progress, stateColour } from "./parts.js";
import { follow, get } from "./source.js";
import { Table } from "./table.js";

// What the reader has chosen survives a visit to another page.
const view = { text: "", state: "", sort: "created", down: true, page: 0, selected: new Set() };

/** The same list, of sweeps alone. */
export function sweepsPage(host, place) {
  return runsPage(host, place, true);
}

export async function runsPage(host, place, areSweeps = false) {
  const rows = new Map(), sweeps = new Map();
  const take = (news) => {
    for (const path of news.gone || []) if (!rows.delete(path)) sweeps.delete(path);
    for (const run of news.runs) rows.set(run.path, run);
    for (const sweep of news.sweeps || []) sweeps.set(sweep.path, sweep);
  };
  const answer = await get("api/runs");
  place(answer.scratch);
  take(answer);

  const chips = h("div", { class: "chips", role: "group", "aria-label": "States" });
  const filter = h("input", { type: "search", placeholder: "Filter: name, script, project, state …", "aria-label": "Filter runs", value: view.text });
  const compare = h("button", { class: "primary", on: { click: () => { location.hash = `#/compare/${[...view.selected].map(encodeURIComponent).join(",")}`; } } });
  const total = h("span", { class: "quiet" });
  const table = new Table({ columns: columns(() => showSelected()), key: (row) => row.path, state: view, kind: "runs", label: "Runs" });
  const content = h("div");
  const draw = () => {
    const all = [...rows.values()];
    const listed = bundle(all, sweeps).filter((row) => row.bundle || !areSweeps);
    const matching = listed.filter((row) => matches(row, view.text.toLowerCase()));
    drawChips(chips, matching, draw);
    const bundles = listed.filter((row) => row.bundle).length;
    total.textContent = [listed.length > bundles || !bundles ? count(listed.length - bundles, "run") : "", bundles ? count(bundles, "sweep") : ""].filter(Boolean).join(", ");
    table.set(view.state ? matching.filter((row) => row.status === view.state) : matching);
    put(content, listed.length ? [toolbar, table.shown.length ? table.host : nothing] : teach(areSweeps));
  };
  const showSelected = () => {
    compare.disabled = view.selected.size < 2;
    compare.textContent = view.selected.size ? `Compare ${view.selected.size}` : "Compare";
    compare.title = compare.disabled ? "Tick two or more runs" : "";
  };
  const toolbar = h("div", { class: "toolbar" }, filter, chips, h("span", { class: "spacer" }), compare);
  const nothing = empty("No run matches", "Change the filter, or choose another state.");
  filter.addEventListener("input", later(() => { Object.assign(view, { text: filter.value, page: 0 }); draw(); }, 80));
  const slash = (event) => {
    if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
    event.preventDefault();
    filter.focus();
  };
  document.addEventListener("keydown", slash);
  put(host, h("div", { class: "head row" }, h("h1", null, areSweeps ? "Sweeps" : "Runs"), total), content);
  showSelected();
  draw();

  const redraw = later(draw, 300);
  const end = follow(`api/events?since=${answer.position ?? 0}`, {
    runs: (news) => {
      place(news.scratch);
      take(news);
      redraw();
    },
  });
  const tick = setInterval(() => table.draw(), 30000); // "3 min ago"
  return () => {
    end();
    clearInterval(tick);
    document.removeEventListener("keydown", slash);
  };
}

function teach(areSweeps) {
  if (areSweeps) return empty("No sweeps yet", "A sweep starts many runs that differ in their parameters:", "paceline sweep sweep.toml");
  return empty("No runs yet", "Start one, and it appears here:", "paceline run train.py\npaceline submit --nodes 2 --gpus 8 train.py");
}

/** The trials of a sweep become one row, with the status that all views show. Trials of an unreadable sweep stay. */
function bundle(runs, sweeps) {
  const trials = new Map([...sweeps.keys()].map((path) => [path, []]));
  const others = runs.filter((run) => {
    const of = run.sweep ? trials.get(run.path.slice(0, run.path.lastIndexOf("/trials/"))) : undefined;
    of?.push(run);
    return !of;
  });
  return [...others, ...[...sweeps.values()].map((sweep) => sweepRow(sweep, trials.get(sweep.path)))];
}

function sweepRow(sweep, trials) {
  const { program = "", nodes = null, nproc = null } = trials[0] || {};
  return {
    ...sweep, bundle: sweep.name, size: sweep.trials, program, nodes, nproc, run_id: sweep.name, detail: "",
    loss: sweep.best, loss_name: sweep.metric, step: null, rate: null, goodput: null,
    updated: Math.max(0, ...trials.map((trial) => trial.updated ?? 0)),
  };
}

function matches(row, text) {
  if (!text) return true;
  const words = [row.name, row.run_id, row.program, row.project, row.experiment, row.status, row.detail, row.job, row.sweep];
  return text.split(/\s+/).every((part) => words.some((word) => word && word.toLowerCase().includes(part)));
}

function drawChips(host, rows, draw) {
  const counts = new Map();
  for (const row of rows) counts.set(row.status, (counts.get(row.status) || 0) + 1);
  if (view.state && !counts.has(view.state)) counts.set(view.state, 0);
  const position = (state) => (STATES.includes(state) ? STATES.indexOf(state) : STATES.length);
  const names = [...counts.keys()].sort((a, b) => position(a) - position(b));
  const signature = JSON.stringify([names.map((name) => [name, counts.get(name)]), view.state]);
  if (host.dataset.signature === signature) return;
  host.dataset.signature = signature;
  const chip = (state, text) => h("button", {
    "aria-pressed": String(view.state === state),
    on: { click: () => { Object.assign(view, { state: view.state === state ? "" : state, page: 0 }); draw(); } },
  }, text);
  put(host, names.map((name) => chip(name, `${plain(name)} ${counts.get(name)}`)));
}

function columns(showSelected) {
  return [
    { name: "select", title: "", kind: "select", cell: (run) => (run.bundle ? "" : box(run, showSelected)) },
    { name: "name", title: "Run", kind: "w-name", order: titleOf, cell: nameCell },
    { name: "status", title: "State", kind: "w-state", order: (run) => run.status, cell: stateCell },
    { name: "progress", title: "Progress", kind: "progress", order: (run) => (run.total_steps ? run.step / run.total_steps : run.step), downFirst: true, cell: (run) => (run.bundle ? bundleBar(run) : progress(run)) },
    { name: "loss", title: "Loss", kind: "num hide w-loss", order: (run) => run.loss, cell: lossCell },
    { name: "rate", title: "Speed", kind: "num hide w-speed", order: (run) => run.rate, downFirst: true, cell: (run) => (run.rate ? [compact(run.rate), h("span", { class: "quiet small" }, ` ${run.rate_unit}`)] : NOTHING) },
    { name: "goodput", title: "Goodput", help: "The share of its time that went into steps that count", kind: "num hide w-short drop-second", order: (run) => run.goodput, downFirst: true, cell: (run) => percent(run.goodput) },
    { name: "ranks", title: "Ranks", kind: "num hide w-short drop-first", order: (run) => run.nodes * run.nproc, downFirst: true, cell: (run) => (run.nodes ? `${run.nodes} × ${run.nproc}` : NOTHING) },
    { name: "created", title: "Created", help: "When it was started, or submitted to Slurm", kind: "num hide w-started", order: (run) => run.created, downFirst: true, cell: (run) => h("time", { title: date(run.created) }, ago(run.created)) },
  ];
}

function box(run, showSelected) {
  const key = keyOf(run);
  const change = () => {
    if (tick.checked) view.selected.add(key);
    else view.selected.delete(key);
    showSelected();
  };
  const tick = h("input", { type: "checkbox", checked: view.selected.has(key), "aria-label": `Select ${titleOf(run)}`, on: { change } });
  return tick;
}

function nameCell(run) {
  const link = run.bundle ? `#/sweep/${encodeURIComponent(run.bundle)}` : `#/run/${encodeURIComponent(keyOf(run))}`;
  const second = [run.bundle ? count(run.size, "trial") : run.name && titleOf(run) !== keyOf(run) ? keyOf(run) : "", plain(run.program).split("/").pop(), plain(run.project)];
  return [h("a", { class: "name", href: link, title: titleOf(run) }, titleOf(run)), h("span", { class: "sub" }, second.filter(Boolean).join(" · "))];
}

function lossCell(run) {
  const name = plain(run.loss_name || "");
  const isBest = run.bundle && run.loss !== null && run.loss !== undefined;
  return [h("span", { title: name }, number(run.loss)), isBest && h("span", { class: "sub", title: `best ${name}` }, `best ${name}`)];
}

function stateCell(run) {
  return [pill(run.status), run.detail && h("span", { class: "sub", title: plain(run.detail) }, plain(run.detail))];
}

function bundleBar(run) {
  const parts = Object.entries(run.counts);
  return [
    h("span", { class: "small" }, parts.map(([state, size]) => `${size} ${plain(state)}`).join(", ")),
    bar(parts.map(([state, size]) => ({ share: size / run.size, colour: stateColour(state), title: state }))),
  ];
}
