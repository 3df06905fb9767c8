// The nodes of a run: what they do now, and what they did.

import { Chart, literal } from "./charts.js";
import { h, put } from "./dom.js";
import { lineColour } from "./curves.js";
import { bytes, duration, number, plain, whole } from "./format.js";
import { bar, empty } from "./parts.js";
import { Table } from "./table.js";

const MAX_LINES = 16; // nodes in one chart

export class NodesView {
  constructor(path, details) {
    this.charts = { gpu: new Chart(), cpu: new Chart() };
    this.cards = h("div", { class: "nodes" });
    this.gpu = h("section", { class: "card" }, h("div", { class: "title" }, h("h3", null, "GPUs busy, %"), h("span", { class: "now" }, "mean of each node")), this.charts.gpu.host);
    this.cpu = h("section", { class: "card" }, h("div", { class: "title" }, h("h3", null, "CPU, %"), h("span", { class: "now" }, "of all cores")), this.charts.cpu.host);
    this.ranks = new Table({ columns: rankColumns(), key: (rank) => String(rank.rank), state: { sort: "rank", down: false, page: 0 }, size: 32, kind: "tight", label: "Ranks" });
    this.host = h("div", { class: "stack" });
    this.update(details);
  }

  update(details) {
    const { nodes, ranks } = details;
    if (!nodes.length && !ranks.length) {
      put(this.host, empty("No samples yet", "The agent on each node measures CPU, memory and GPUs while the run is running."));
      return;
    }
    put(this.cards, nodes.map(card));
    const hasGpus = nodes.some((node) => node.gpus.length);
    put(this.host, this.cards, h("div", { class: "charts" }, hasGpus && this.gpu, this.cpu), ranks.length ? this.ranks.host : null);
    this.ranks.set(ranks);
    this.charts.cpu.set(() => history(nodes, (sample) => sample.cpu));
    if (hasGpus) this.charts.gpu.set(() => history(nodes, (sample) => mean((sample.gpus || []).map((gpu) => gpu.busy))));
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
  }
}

function card(node) {
  const sample = node.samples.at(-1) || {};
  return h("section", { class: "card" },
    h("div", { class: "title" }, h("h3", null, plain(node.host)), h("span", { class: "now small" }, `node ${node.node}`)),
    meter("CPU", sample.cpu / 100, `${whole(sample.cpu)} % of ${node.cores ?? "?"} cores`),
    meter("Memory", sample.memory / node.memory, `${bytes(sample.memory)} of ${bytes(node.memory)}`),
    node.gpus.length ? h("div", { class: "gpus" }, node.gpus.map((gpu, index) => tile(gpu, (sample.gpus || [])[index] || {}, index))) : null,
  );
}

function meter(name, share, text) {
  return Number.isFinite(share) ? h("div", { class: "meter" }, h("span", null, name), bar([{ share, colour: share > 0.95 ? "var(--red)" : "var(--accent)" }]), h("span", null, text)) : null;
}

function tile(gpu, sample, index) {
  const facts = [plain(gpu.name ?? "GPU"), `${whole(sample.busy)} % busy`, `${bytes(sample.memory)} of ${bytes(gpu.memory)}`, sample.power ? `${whole(sample.power)} W` : "", sample.temperature ? `${whole(sample.temperature)} °C` : ""];
  return h("div", { class: "gpu", title: `GPU ${index}: ${facts.filter(Boolean).join(", ")}`, style: { "--busy": String(0.75 * (sample.busy || 0)) } },
    h("b", null, sample.busy === undefined ? "–" : `${whole(sample.busy)} %`), sample.memory === undefined ? `GPU ${index}` : bytes(sample.memory));
}

function history(nodes, pick) {
  const data = nodes.slice(0, MAX_LINES).map((node, index) => ({
    type: "scatter", mode: "lines", line: { color: lineColour(index), width: 1.5 },
    x: node.samples.map((sample) => new Date(1000 * sample.time).toISOString()), y: node.samples.map(pick),
    hovertemplate: `%{y:.0f} %<extra>${literal(plain(node.host))}</extra>`,
  }));
  return { data, layout: { hovermode: "x", yaxis: { range: [0, 102], nticks: 6 }, xaxis: { type: "date", showgrid: false, nticks: 6 }, margin: { l: 36, r: 10, t: 6, b: 30 } } };
}

function mean(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function rankColumns() {
  return [
    { name: "rank", title: "Rank", kind: "num", order: (rank) => rank.rank, cell: (rank) => String(rank.rank) },
    { name: "host", title: "Host", order: (rank) => rank.host, cell: (rank) => plain(rank.host) },
    { name: "state", title: "State", order: (rank) => rank.state, cell: (rank) => plain(rank.state ?? "") },
    { name: "step", title: "Step", kind: "num", order: (rank) => rank.step, cell: (rank) => whole(rank.step) },
    { name: "seconds", title: "Seconds per step", kind: "num", order: (rank) => rank.seconds_per_step, downFirst: true, cell: (rank) => number(rank.seconds_per_step, 3) },
    { name: "waited", title: "Waited for data", kind: "num", order: (rank) => rank.waited, downFirst: true, cell: (rank) => duration(rank.waited) },
    { name: "slow", title: "", order: (rank) => (rank.is_slow ? 1 : 0), cell: (rank) => (rank.is_slow ? h("span", { class: "pill amber" }, "slowest") : "") },
  ];
}
