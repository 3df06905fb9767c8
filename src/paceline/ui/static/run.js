// One run: its numbers, curves, output, nodes, time and settings.

import { confirmed, h, later, notify, put } from "./dom.js";
import { ago, compact, count, date, duration, number, percent, plain, titleOf, whole } from "./format.js";
import { MetricsView } from "./curves.js";
import { LogView } from "./log.js";
import { NodesView } from "./nodes.js";
import { SettingsView, TimeView } from "./panels.js";
import { bar, pill, stateColour, tabs, tile } from "./parts.js";
import { act, follow, get, isReport } from "./source.js";

const TABS = { metrics: ["Metrics", MetricsView], log: ["Log", LogView], nodes: ["Nodes", NodesView], time: ["Time", TimeView], settings: ["Settings and code", SettingsView] };
const ACTIONS = {
  stop: ["Save and stop", "All ranks save a checkpoint at the same step, then the run ends. You can resume it."],
  requeue: ["Requeue", "The run saves a checkpoint and is requeued."],
  cancel: ["Cancel", lossOf, "Cancel the run"],
};
const LEAVE_QUEUE = ["Cancel", "Its job leaves the queue. You can submit the run again.", "Cancel the run"];
const WAITING = ["queued", "pending", "held", "submitted", "prepared"];

export async function runPage(host, place, argument, [tab]) {
  const key = decodeURIComponent(argument), path = `api/runs/${argument}`;
  let details = await get(path);
  const metrics = new MetricsView();
  const views = new Map([["metrics", metrics]]); // by tab; the others are made when first opened
  const head = h("div", { class: "head" }), tiles = h("div", { class: "tiles" }), banner = h("div"), panel = h("div", { role: "tabpanel" });
  const update = () => {
    place(details.place);
    drawHead(head, key, details);
    drawTiles(tiles, details);
    drawBanner(banner, details);
    for (const view of views.values()) view.update(details);
  };
  let end = () => {};
  const redraw = later(update, 300);
  const listen = (log = "") => {
    end();
    end = follow(`api/events?key=${argument}${log}`, {
      details: (news) => {
        details = news;
        redraw();
      },
      curves: (news) => metrics.addCurves(news),
      log: (news) => views.get("log").addLines(news),
    });
  };
  const open = (name) => {
    if (!views.has(name)) views.set(name, new TABS[name][1](path, details, listen));
    put(panel, views.get(name).host);
    views.get(name).opened?.();
    history.replaceState(null, "", `#/run/${argument}${name === "metrics" ? "" : `/${name}`}`);
  };
  if (isReport) metrics.addCurves({ whole: true, curves: (await get(`${path}/curves`)).curves });
  else listen();
  const first = tab || (details.overview.step === null && details.overview.is_over ? "log" : "metrics");
  put(host, head, tiles, banner, tabs(Object.entries(TABS).map(([name, [text]]) => [name, text]), first, open), panel);
  update();
  return () => {
    end();
    for (const view of views.values()) view.close?.();
  };
}

function drawHead(host, key, details) {
  const run = details.overview;
  host.newest = details; // what a question tells is as new as the page
  const second = [titleOf(run) === plain(key) ? "" : plain(key), plain(run.program), plain(run.project), plain(run.experiment), run.job && `job ${run.job}`, `${run.job || WAITING.includes(run.status) ? "submitted" : "started"} ${date(run.created)}`, isPlace(run) && `on ${plain(run.detail)}`];
  const crumb = run.sweep
    ? h("p", { class: "crumb" }, "Trial of ", h("a", { href: `#/sweep/${encodeURIComponent(run.sweep)}` }, plain(run.sweep)))
    : null;
  if (same(host, [run.status, run.detail, run.name, details.actions, run.job])) return;
  put(
    host,
    crumb,
    h("div", { class: "row" }, h("h1", null, titleOf(run)), pill(run.status), h("span", { class: "spacer" }), actions(key, details, () => host.newest)),
    h("p", { class: "quiet small" }, second.filter(Boolean).join(" · ")),
  );
}

/** Whether the detail only names the nodes, rather than telling why a run waits, ended or seems dead. */
function isPlace(run) {
  return ["running", "done", "ending"].includes(run.status) && /^\S+$/.test(run.detail);
}

function same(host, facts) {
  const signature = JSON.stringify(facts);
  if (host.dataset.signature === signature) return true;
  host.dataset.signature = signature;
  return false;
}

/** What the server lets readers do with a run now. */
function actions(key, details, newest) {
  return (details.actions || []).filter((verb) => ACTIONS[verb]).map((verb) => {
    const waits = verb === "cancel" && details.overview.status !== "running";
    const [text, meaning, button = text] = details.overview.is_over ? ["Submit again", nextStart] : waits ? LEAVE_QUEUE : ACTIONS[verb];
    const ask = async () => {
      if (!(await confirmed(`${text}: ${titleOf(details.overview)}?`, typeof meaning === "function" ? meaning(newest()) : meaning, button))) return;
      try {
        const answer = await act(key, verb);
        notify(answer.message || `${text}: asked`);
      } catch (problem) {
        notify(problem.message, true);
      }
    };
    return h("button", { class: verb === "cancel" ? "danger" : null, on: { click: ask } }, text);
  });
}

/** What cancelling a run costs. */
function lossOf({ checkpoints, overview, actions: allowed }) {
  const lost = checkpoints.length
    ? `Steps since its last checkpoint (step ${whole(checkpoints.at(-1).step)}) are lost`
    : overview.step === null ? "What the script has not saved itself is lost" : "It has no checkpoint: all of its steps are lost";
  return `${lost}, and it is not requeued.${(allowed || []).includes("stop") ? " To keep them, use “Save and stop”." : ""}`;
}

function nextStart({ checkpoints }) {
  const begin = checkpoints.length ? `The run continues from its newest checkpoint (step ${whole(checkpoints.at(-1).step)})` : "It has no checkpoint: the script starts from the beginning";
  return `${begin}, as a new job with the same code and settings.`;
}

function drawTiles(host, details) {
  const run = details.overview;
  const goodput = details.goodput;
  const failed = details.attempts.filter((attempt) => attempt.verdict === "failed").length;
  put(
    host,
    barred(tile("Step", whole(run.step), run.total_steps ? `of ${whole(run.total_steps)}` : run.updated ? `logged ${ago(run.updated)}` : run.is_over ? "none logged" : "none yet"), run.total_steps ? run.step / run.total_steps : 0, stateColour(run.status)),
    tile(run.is_over ? "Took" : "Time left", run.is_over ? duration(goodput.total) : duration(run.seconds_left), run.is_over ? "from start to end" : `after ${duration(goodput.total)}`),
    tile(run.loss_name ? plain(run.loss_name) : "Loss", number(run.loss), run.loss_name ? "newest" : "none is logged"),
    tile("Speed", compact(run.rate), run.rate_unit || "not measured"),
    barred(tile("Goodput", percent(run.goodput), "in steps that count"), run.goodput || 0, "var(--g-training)"),
    tile("Ranks", `${run.nodes} × ${run.nproc}`, `${count(run.nodes, "node")}, ${run.nproc} per node`),
    tile("Attempts", String(run.attempts), failed ? `${failed} failed` : details.checkpoints.length ? count(details.checkpoints.length, "checkpoint") : "no checkpoint"),
  );
}

function barred(element, share, colour) {
  element.append(bar([{ share, colour }]));
  return element;
}

function drawBanner(host, details) {
  const run = details.overview;
  const failure = details.failure ?? details.attempts.findLast((attempt) => attempt.failure)?.failure;
  if (same(host, [run.status, run.detail, run.hint, failure])) return;
  const notes = [];
  if (failure) {
    const isPast = failure.attempt < run.attempts || run.status === "done";
    const who = failure.rank === null ? "The launch failed" : `Rank ${failure.rank} failed first`;
    const past = isPast ? ` in attempt ${failure.attempt}; a later attempt continued` : "";
    notes.push(h("section", { class: `banner ${isPast ? "amber" : "red"}`, "aria-label": "Failure" },
      h("strong", null, `${who}${failure.host ? ` on ${plain(failure.host)}` : ""}${past}: `),
      h("span", null, plain(failure.text)),
      failure.where && h("div", { class: "quiet small mono" }, `at ${plain(failure.where)}`),
      failure.traceback && h("details", { open: !isPast }, h("summary", null, "Traceback"), h("pre", null, plain(failure.traceback))),
    ));
  }
  if (run.detail && !isPlace(run) && !(failure && run.is_over)) {
    notes.push(h("p", { class: `banner ${run.is_over ? "" : "amber"}` }, plain(run.detail), run.hint && h("span", { class: "quiet" }, ` ${plain(run.hint)}`)));
  }
  put(host, notes);
}
