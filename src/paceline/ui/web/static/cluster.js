// The cluster: partitions with what is free, and your own queue.

import { h, put } from "./dom.js";
import { NOTHING, count, plain, whole } from "./format.js";
import { bar, empty, pill } from "./parts.js";
import { get } from "./source.js";

const INTERVAL = 60000; // milliseconds; the server asks Slurm no more often

export async function clusterPage(host, place) {
  place("");
  const body = h("div", { class: "stack" });
  const read = async () => draw(body, await get("api/cluster"));
  put(host, h("div", { class: "head row" }, h("h1", null, "Cluster")), body);
  await read();
  const timer = setInterval(() => { if (!document.hidden) read().catch(() => {}); }, INTERVAL);
  return () => clearInterval(timer);
}

function draw(host, answer) {
  if (answer.problem && !answer.partitions.length) {
    put(host, empty("No cluster here", plain(answer.problem), "paceline sandbox up   # a real Slurm on this machine, to try things out"));
    return;
  }
  put(host,
    answer.problem ? h("p", { class: "banner amber" }, plain(answer.problem)) : null,
    h("section", { class: "card flush" }, heading("Partitions"), answer.partitions.length ? partitions(answer.partitions) : empty("No partitions", "Slurm lists none for you.")),
    h("section", { class: "card flush" }, heading("Your queue", answer.queue.length ? count(answer.queue.length, "job") : ""), answer.queue.length ? queue(answer.queue) : empty("Your queue is empty", "Jobs that you submit appear here.", "paceline submit --gpus 1 train.py")));
}

function heading(text, more = "") {
  return h("div", { class: "row", style: { padding: "14px 16px 6px" } }, h("h2", null, text), h("span", { class: "quiet" }, more));
}

function partitions(list) {
  return table(["Partition", "State", "Free GPUs", "Free nodes", "Free CPUs", "Time limit"], list.map((each) => [
    h("strong", null, plain(each.partition)),
    pill(each.state === "up" ? "up" : plain(each.state)),
    [h("span", { class: "small" }, `${plain(each.free_gpus)} of ${plain(each.gpus)}`), free(sum(each.free_gpus), sum(each.gpus))],
    [h("span", { class: "small" }, `${whole(each.idle_nodes)} of ${whole(each.nodes)}`), free(each.idle_nodes, each.nodes)],
    [h("span", { class: "small" }, `${whole(each.free_cpus)} of ${whole(each.cpus)}`), free(each.free_cpus, each.cpus)],
    plain(each.time_limit || NOTHING),
  ]));
}

/** The numbers in a text such as `4 h100, 2 a100`. */
function sum(text) {
  return (String(text).match(/\d+(?= |,|$)/g) || []).reduce((total, part) => total + Number(part), 0);
}

function free(some, all) {
  return bar([{ share: all ? some / all : 0, colour: "var(--g-training)" }]);
}

function queue(list) {
  return table(["Job", "State", "Reason", "Nodes", "Start", "Elapsed"], list.map((each) => [
    h("span", { class: "mono" }, plain(each.job)), pill(plain(each.state)), plain(each.reason || ""), plain(each.nodes || ""), plain(each.start || NOTHING), plain(each.elapsed || NOTHING),
  ]));
}

function table(titles, rows) {
  return h("div", { class: "table" }, h("table", null,
    h("thead", null, h("tr", null, titles.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell) => h("td", null, cell)))))));
}
