// The cluster: partitions with what is free, and your own queue.

import { h, put } from "./dom.js";
import { NOTHING, count, plain, titleOf, whole } from "./format.js";
import { bar, empty, pill, plainTable } from "./parts.js";
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
    const title = answer.cluster ? `${plain(answer.cluster)} is elsewhere` : "No cluster here";
    put(host, empty(title, plain(answer.problem), plain(answer.command) || "paceline sandbox up   # a real Slurm on this machine, to try things out"));
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
  const titles = [["Partition"], ["State"], ["Free GPUs"], ["Free nodes"], ["Free CPUs", "wide-only"], ["Time limit", "wide-only"]];
  return plainTable(titles, list.map((each) => [
    h("strong", null, plain(each.partition)),
    pill(each.state === "up" ? "up" : plain(each.state)),
    each.gpus.length ? each.gpus.map((gpu) => share(gpu.free, gpu.count, gpu.kind)) : NOTHING,
    share(each.idle_nodes, each.nodes),
    share(each.free_cpus, each.cpus),
    plain(each.time_limit || NOTHING),
  ]));
}

function share(some, all, what = "") {
  return [h("span", { class: "small" }, `${whole(some)} of ${whole(all)} ${plain(what)}`.trim()), bar([{ share: all ? some / all : 0, colour: "var(--g-training)" }])];
}

function queue(list) {
  const titles = [["Job"], ["Run"], ["State"], ["Where / why"], ["Start", "wide-only"], ["Elapsed", "wide-only"]];
  return plainTable(titles, list.map((each) => [
    h("span", { class: "mono" }, plain(each.job)),
    each.run ? h("a", { href: `#/run/${encodeURIComponent(each.run.key)}` }, titleOf({ ...each.run, run_id: each.run.key })) : NOTHING,
    pill(plain(each.state)),
    plain(each.nodes || each.reason),
    plain(each.start || NOTHING),
    plain(each.elapsed || NOTHING),
  ]));
}
