// Several runs on top of each other: curves and configurations.

import { h, put } from "./dom.js";
import { CurveGrid, curveControls, lineColour, ordered } from "./curves.js";
import { NOTHING, compact, duration, number, percent, plain, titleOf, value } from "./format.js";
import { empty, pill, plainTable } from "./parts.js";
import { flatten } from "./settings.js";
import { get } from "./source.js";

const options = { weight: 0, axis: "step", log: false };

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
  const grid = new CurveGrid(options, (name) =>
    runs.filter((run) => run.isShown && run.curves.has(name)).map((run) => ({ label: titleOf(run.details.overview), curve: run.curves.get(name), colour: run.colour })),
  );
  const names = () => ordered(new Set(runs.flatMap((run) => [...run.curves.keys()])));
  const all = h("input", { type: "checkbox", on: { change: () => put(table, differences(runs, all.checked)) } });
  const table = h("div", { class: "table" }, differences(runs, false));
  put(
    host,
    h("div", { class: "head" }, h("h1", null, `Compare ${runs.length} runs`)),
    h("section", { class: "card flush summary" }, summary(runs, () => grid.refresh())),
    h("div", { class: "toolbar", style: { "margin-top": "20px" } }, curveControls(options, () => grid.refresh())),
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
