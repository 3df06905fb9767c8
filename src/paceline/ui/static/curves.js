// Curves of metrics: smoothing, axes, the curves of one run, and several runs on top of each other.

import { Chart, PALETTE, literal } from "./charts.js";
import { h, later, put } from "./dom.js";
import { NOTHING, compact, duration, number, percent, plain, titleOf, value } from "./format.js";
import { flatten } from "./panels.js";
import { empty, pill, plainTable, segments } from "./parts.js";
import { get } from "./source.js";

const UNITS = [["d", 2 * 86400, 86400], ["h", 2 * 3600, 3600], ["min", 180, 60], ["s", 0, 1]];

/** An exponential moving average that starts at the first value instead of at zero. */
export function smooth(values, weight) {
  let mean = 0, known = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

/** Append points to a curve. A restart repeats steps: what it repeats is replaced. */
export function extend(curve, fresh) {
  let length = curve.steps.length;
  while (length && fresh.steps.length && curve.steps[length - 1] >= fresh.steps[0]) length -= 1;
  for (const key of ["steps", "times", "values"]) {
    curve[key].length = length;
    curve[key].push(...fresh[key]);
  }
}

/** The chart of some lines, `[{label, curve, colour}]`, as Plotly takes it. `options`: weight, axis, log. */
export function curveFigure(lines, options) {
  const span = Math.max(0, ...lines.map(({ curve }) => (curve.times.at(-1) ?? 0) - (curve.times[0] ?? 0)));
  const [unit, , size] = UNITS.find(([, least]) => span >= least);
  const isTime = options.axis === "time";
  const data = lines.flatMap(({ label, curve, colour }) => {
    const x = isTime ? curve.times.map((time) => (time - curve.times[0]) / size) : curve.steps;
    const where = isTime ? `%{x:.3~f} ${unit}` : "step %{x:,}";
    const shown = { type: "scatter", mode: curve.steps.length === 1 ? "markers" : "lines", x, hovertemplate: `${where}<br>%{y:.5~g}<extra>${label ? literal(label) : ""}</extra>` };
    const line = { color: colour, width: 1.75 };
    if (!options.weight) return [{ ...shown, y: curve.values, line, marker: { color: colour } }];
    return [
      { ...shown, y: curve.values, line: { color: colour, width: 1 }, opacity: 0.25, hoverinfo: "skip", hovertemplate: undefined },
      { ...shown, y: smooth(curve.values, options.weight), line },
    ];
  });
  const values = lines.flatMap(({ curve }) => curve.values).filter(Number.isFinite);
  const [low, high] = values.reduce(([least, most], each) => [Math.min(least, each), Math.max(most, each)], [Infinity, -Infinity]);
  const flat = !options.log && low === high && low !== 0 ? { range: [Math.min(0, 2 * low), Math.max(0, 2 * low)] } : {}; // or it is drawn from -1 to 1
  const layout = {
    margin: { l: 52, r: 10, t: 6, b: 30 },
    hovermode: lines.length > 1 ? "x" : "closest",
    xaxis: { ticksuffix: isTime ? ` ${unit}` : "", nticks: 7, tickformat: isTime ? "" : "~s", rangemode: "nonnegative", showgrid: false },
    yaxis: { type: options.log ? "log" : "linear", nticks: 6, tickformat: options.log ? ".1~e" : "", exponentformat: "power", ...flat },
    uirevision: `${options.axis} ${options.log}`, // zoom stays while points arrive
  };
  return { data, layout };
}

/** The controls above curves. `change` is called with the options. */
export function curveControls(options, change) {
  const shown = h("output", null, options.weight.toFixed(2));
  const slide = later(() => change(options), 60);
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: options.weight, "aria-label": "Smoothing", on: { input: () => {
    options.weight = Number(slider.value);
    shown.textContent = options.weight.toFixed(2);
    slide();
  } } });
  return [
    h("label", null, "Smoothing", slider, shown),
    segments("Horizontal axis", [["step", "Step"], ["time", "Time"]], options.axis, (axis) => change(Object.assign(options, { axis }))),
    segments("Vertical axis", [[false, "Linear"], [true, "Log"]], options.log, (log) => change(Object.assign(options, { log }))),
  ];
}

/** Cards of charts, one per metric, in a grid. `linesOf(name)` returns its lines. */
export class CurveGrid {
  constructor(options, linesOf) {
    this.options = options;
    this.linesOf = linesOf;
    this.cards = new Map();
    this.host = h("div", { class: "charts" });
  }

  /** Show these metrics, in this order. */
  show(names) {
    for (const [name, card] of this.cards) {
      if (!names.includes(name)) {
        card.chart.close();
        card.host.remove();
        this.cards.delete(name);
      }
    }
    names.forEach((name, index) => {
      const card = this.cards.get(name) || this.add(name);
      if (this.host.children[index] !== card.host) this.host.insertBefore(card.host, this.host.children[index] || null);
    });
    this.refresh(names);
  }

  add(name) {
    const chart = new Chart();
    const now = h("span", { class: "now" });
    const host = h("section", { class: "card", "data-metric": name }, h("div", { class: "title" }, h("h3", { title: plain(name) }, plain(name)), now), chart.host);
    const card = { host, chart, now };
    this.cards.set(name, card);
    return card;
  }

  refresh(names = [...this.cards.keys()]) {
    for (const name of names) {
      const card = this.cards.get(name);
      if (!card) continue;
      const lines = this.linesOf(name);
      card.now.textContent = lines.length === 1 ? number(lines[0].curve.values.at(-1)) : "";
      card.host.dataset.points = String(lines.reduce((sum, line) => sum + line.curve.steps.length, 0));
      card.chart.set(() => curveFigure(lines, this.options));
    }
  }

  close() {
    for (const card of this.cards.values()) card.chart.close();
  }
}

/** Metrics as people look for them: losses, then scores, then the rest, speed last. */
export function ordered(names) {
  const rank = (name) => {
    const low = name.toLowerCase();
    if (low === "loss") return 0;
    if (low.includes("loss")) return 1;
    if (/acc|score|perplexity|bleu|f1|auc|reward/.test(low)) return 2;
    return /second|rate$|memory|time|wait|flops|mfu/.test(low) ? 4 : 3;
  };
  return [...names].sort((a, b) => rank(a) - rank(b));
}

export function lineColour(index) {
  return PALETTE[index % PALETTE.length];
}

const shown = { weight: 0, axis: "step", log: false }; // kept from run to run

export class MetricsView {
  constructor() {
    this.curves = new Map();
    this.grid = new CurveGrid(shown, (name) => [{ label: "", curve: this.curves.get(name), colour: lineColour(0) }]);
    this.toolbar = h("div", { class: "toolbar" }, curveControls(shown, () => this.grid.refresh()));
    this.host = h("div", { class: "curves" }, this.toolbar, this.grid.host);
  }

  /** Take points that are new, or all of them. */
  addCurves(news) {
    if (news.whole) this.curves.clear();
    const changed = [];
    for (const curve of news.curves) {
      const known = this.curves.get(curve.name);
      if (known) extend(known, curve);
      else this.curves.set(curve.name, curve);
      if (known) changed.push(curve.name);
    }
    if (changed.length === news.curves.length && this.grid.cards.size) this.grid.refresh(changed);
    else this.draw();
  }

  draw() {
    const names = ordered(this.curves.keys());
    this.grid.show(names);
    if (!names.length) put(this.host, empty("No metrics yet", "Numbers that your script logs appear here as curves:", "run.log(loss=loss)"));
    else put(this.host, this.toolbar, this.grid.host);
  }

  update() {}

  close() {
    this.grid.close();
  }
}

const compared = { weight: 0, axis: "step", log: false };

export async function comparePage(host, place, argument) {
  place("");
  const keys = [...new Set(argument.split(",").filter(Boolean))];
  if (keys.length < 2) {
    put(host, empty("Nothing to compare", "Tick two or more runs in the list, then choose Compare."));
    return null;
  }
  const runs = await Promise.all(keys.map(async (key, index) => {
    const [details, answer] = await Promise.all([get(`api/runs/${key}`), get(`api/runs/${key}/curves`)]);
    const curves = new Map(answer.curves.map((curve) => [curve.name, curve]));
    return { key, details, curves, colour: lineColour(index), isShown: true };
  }));
  const grid = new CurveGrid(compared, (name) =>
    runs.filter((run) => run.isShown && run.curves.has(name)).map((run) => ({ label: titleOf(run.details.overview), curve: run.curves.get(name), colour: run.colour })),
  );
  const names = () => ordered(new Set(runs.flatMap((run) => [...run.curves.keys()])));
  const all = h("input", { type: "checkbox", on: { change: () => put(table, differences(runs, all.checked)) } });
  const table = h("div", { class: "table" }, differences(runs, false));
  put(
    host,
    h("div", { class: "head" }, h("h1", null, `Compare ${runs.length} runs`)),
    h("section", { class: "card flush summary" }, summary(runs, () => grid.refresh())),
    h("div", { class: "toolbar", style: { "margin-top": "20px" } }, curveControls(compared, () => grid.refresh())),
    grid.host,
    h("section", { class: "card flush", style: { "margin-top": "20px" } },
      h("div", { class: "row", style: { padding: "14px 16px 6px" } }, h("h2", null, "Configuration"), h("span", { class: "spacer" }), h("label", null, all, "Also show equal values")), table),
  );
  grid.show(names());
  return () => grid.close();
}

/** One line per run, with its colour and a box that hides it. */
function summary(runs, refresh) {
  const titles = [[""], ["Run"], ["State"], ["Step", "num"], ["Loss", "num"], ["Speed", "num"], ["Goodput", "num"], ["Time", "num"]];
  return plainTable(titles, runs.map((run) => {
    const { overview, goodput } = run.details;
    const box = h("input", { type: "checkbox", checked: true, "aria-label": `Show ${titleOf(overview)}`, on: { change: () => { run.isShown = box.checked; refresh(); } } });
    return [
      h("label", null, box, h("span", { class: "swatch", style: { background: run.colour } })),
      h("a", { class: "name", href: `#/run/${run.key}` }, titleOf(overview)),
      pill(overview.status),
      number(overview.step),
      number(overview.loss),
      overview.rate ? `${compact(overview.rate)} ${overview.rate_unit}` : NOTHING,
      percent(overview.goodput),
      duration(goodput.total),
    ];
  }));
}

function differences(runs, isAll) {
  const tables = runs.map((run) => new Map([
    ...Object.entries(run.details.config),
    ...flatten(run.details.settings).map(([name, any]) => [`[${name}]`, any]),
    ["command", run.details.command], ["commit", run.details.code.commit],
  ]));
  const names = [...new Set(tables.flatMap((each) => [...each.keys()]))];
  const rows = names.map((name) => {
    const texts = tables.map((each) => plain(value(each.get(name))));
    return { name, texts, differs: new Set(texts).size > 1 };
  }).filter((row) => isAll || row.differs);
  if (!rows.length) return empty("No difference", "These runs have the same configuration.");
  return h("table", null,
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), runs.map((run) => h("th", { scope: "col" }, h("span", { class: "swatch", style: { background: run.colour } }), ` ${titleOf(run.details.overview)}`)))),
    h("tbody", null, rows.map((row) => h("tr", { class: row.differs && isAll ? "differs" : null },
      h("td", { class: "quiet" }, plain(row.name)), row.texts.map((text) => h("td", { class: "value mono" }, h("div", null, text)))))),
  );
}
