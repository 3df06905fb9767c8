// Sweeps: the list, and one sweep with its trials and figures.

import { Chart, canBeDrawn, harmless } from "./charts.js";
import { h, later, put } from "./dom.js";
import { NOTHING, count, duration, number, plain, value } from "./format.js";
import { bar, empty, facts, pill, stateColour, tile } from "./parts.js";
import { get, isReport } from "./source.js";
import { Table } from "./table.js";

const INTERVAL = 10000; // milliseconds between two looks at a sweep that is under way
const LIVE = ["running", "pending"];

export async function sweepPage(host, place, argument) {
  const path = `api/sweeps/${argument}`;
  let sweep = await get(path);
  place(sweep.path ?? "");
  const charts = [];
  const progress = h("div"), title = h("div", { class: "row" }), figures = h("div", { class: "charts figures" });
  const state = { sort: "value", down: sweep.direction === "maximize", page: 0 };
  const filter = h("input", { type: "search", placeholder: "Filter trials: state, parameter …", "aria-label": "Filter trials", on: { input: later(() => draw(), 80) } });
  const table = new Table({ columns: rowColumns(sweep), key: (row) => String(row.number), state, size: 25, label: "Trials" });
  const draw = () => {
    put(title, h("h1", null, plain(sweep.name)), pill(sweep.status));
    drawProgress(progress, sweep);
    table.set(sweep.rows.filter((row) => matches(row, filter.value.toLowerCase())));
    drawFigures(figures, charts, sweep.figures.filter(({ figure }) => canBeDrawn(figure)));
  };
  const failed = failures(sweep);
  put(host,
    h("div", { class: "head" }, title, h("p", { class: "quiet" }, `${plain(sweep.metric)}, ${sweep.direction === "maximize" ? "larger is better" : "smaller is better"}`)),
    progress,
    figures,
    h("div", { class: "toolbar", style: { "margin-top": "20px" } }, h("h2", null, "Trials"), h("span", { class: "spacer" }), filter),
    sweep.rows.length ? table.host : empty("No trials yet", "They appear when the sweep starts its first run."),
    failed);
  draw();
  const isLive = () => LIVE.some((name) => sweep.counts[name]);
  const timer = !isReport && setInterval(async () => {
    if (!isLive() || document.hidden) return;
    try {
      sweep = await get(path);
      draw();
    } catch { /* the next look may work */ }
  }, INTERVAL);
  return () => {
    clearInterval(timer);
    for (const chart of charts) chart.close();
  };
}

function total(sweep) {
  return Object.values(sweep.counts).reduce((sum, size) => sum + size, 0);
}

function countsText(sweep) {
  return Object.entries(sweep.counts).map(([state, size]) => `${size.toLocaleString("en")} ${plain(state)}`).join(", ") || "none";
}

function countsBar(sweep, kind = "") {
  const all = total(sweep) || 1;
  return bar(Object.entries(sweep.counts).map(([state, size]) => ({ share: size / all, colour: stateColour(state), title: `${size} ${state}` })), kind);
}

function drawProgress(host, sweep) {
  const signature = JSON.stringify([sweep.counts, sweep.best?.value]);
  if (host.dataset.signature === signature) return;
  host.dataset.signature = signature;
  const found = sweep.best;
  put(host,
    h("div", { class: "tiles" },
      tile("Best", found ? number(found.value, 5) : NOTHING, found ? `trial ${found.number}` : "no trial has ended with a value"),
      tile("Trials", total(sweep).toLocaleString("en"), countsText(sweep)),
      tile("Sampler", plain(sweep.sampler || NOTHING), sweep.pruner && sweep.pruner !== "none" ? `pruner ${plain(sweep.pruner)}` : "")),
    h("div", { class: "columns", style: { "margin-bottom": "16px" } },
      h("section", { class: "card" }, h("h2", null, "Progress"), countsBar(sweep, "tall"),
        h("div", { class: "legend" }, Object.entries(sweep.counts).map(([state, size]) => h("span", null, h("i", { style: { background: stateColour(state) } }), `${plain(state)} `, h("b", null, size.toLocaleString("en")))))),
      found ? h("section", { class: "card" }, h("h2", null, "Best point: ", h("a", { href: `#/run/${encodeURIComponent(`${sweep.name}-${found.number}`)}` }, `trial ${found.number}`)), facts(Object.entries(found.point).map(([name, any]) => [plain(name), h("code", null, plain(value(any)))]))) : null));
}

function drawFigures(host, charts, figures) {
  while (charts.length < figures.length) {
    const chart = new Chart(isWide(figures[charts.length].figure) ? "tall" : "high");
    charts.push(chart);
    host.append(h("section", { class: isWide(figures[charts.length - 1].figure) ? "card whole" : "card" }, h("div", { class: "title" }, h("h3")), chart.host));
  }
  figures.forEach(({ title, figure }, index) => {
    host.children[index].querySelector("h3").textContent = plain(title);
    charts[index].set(() => restyled(figure));
  });
}

/** Figures of many axes need the whole width. */
function isWide(figure) {
  const axes = Object.keys(figure.layout || {}).filter((name) => /^xaxis\d+$/.test(name)).length;
  return axes > 1 || figure.data.some((trace) => trace.type === "parcoords") || figure.data.length > 12;
}

/** A figure with the margins of its kind. */
function restyled(figure) {
  const { data, layout } = harmless(figure);
  const isParallel = data.some((trace) => trace.type === "parcoords");
  return { data, layout: { ...layout, legend: { orientation: "h", y: 1.08 }, margin: isParallel ? { l: 70, r: 70, t: 50, b: 24 } : { l: 60, r: 16, t: 30, b: 50 } } };
}

function rowColumns(sweep) {
  const named = (name) => ({ name: `of ${name}`, title: plain(name), kind: "num", order: (row) => row.point[name], cell: (row) => (row.point[name] === undefined || row.point[name] === null ? "" : plain(value(row.point[name]))) });
  return [
    { name: "number", title: "Trial", kind: "num", order: (row) => row.number, cell: (row) => [h("a", { href: `#/run/${encodeURIComponent(`${sweep.name}-${row.number}`)}` }, String(row.number)), row.numbers.length > 1 && h("span", { class: "quiet" }, `–${row.numbers.at(-1)}`)] },
    { name: "state", title: "State", order: (row) => row.state, cell: (row) => h("span", { title: plain(row.error || row.status) }, pill(row.state), row.state === "pruned" && row.step !== null && h("span", { class: "quiet small" }, ` at step ${row.step}`)) },
    { name: "value", title: plain(sweep.metric), kind: "num", order: (row) => (row.counts ? row.value : null), cell: (row) => [number(row.value, 5), row.deviation !== null && h("span", { class: "quiet" }, ` ± ${number(row.deviation, 2)} (n = ${row.count})`)] },
    ...sweep.keys.map(named),
    { name: "seconds", title: "Time", kind: "num", order: (row) => row.seconds, cell: (row) => duration(row.seconds) },
  ];
}

function matches(trial, text) {
  if (!text) return true;
  const words = [trial.state, trial.error, ...Object.entries(trial.point).map(([name, any]) => `${name}=${value(any)}`)];
  return text.split(/\s+/).every((part) => words.some((word) => word && word.toLowerCase().includes(part)));
}

function failures(sweep) {
  const reasons = new Map();
  for (const trial of sweep.trials) if (trial.error && trial.state !== "done") reasons.set(trial.error, [...(reasons.get(trial.error) || []), trial.number]);
  if (!reasons.size) return null;
  const listed = [...reasons].sort((a, b) => b[1].length - a[1].length).slice(0, 20);
  return h("section", { class: "card", style: { "margin-top": "20px" } }, h("h2", null, "Failures"),
    facts(listed.map(([error, numbers]) => [`${count(numbers.length, "trial")}: ${numbers.slice(0, 6).join(", ")}${numbers.length > 6 ? " …" : ""}`, h("code", null, plain(error))])));
}
