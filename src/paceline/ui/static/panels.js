// What a run was asked to do, and where its time went.

import { h, put } from "./dom.js";
import { NOTHING, clock, date, duration, plain, value } from "./format.js";
import { command, empty, facts, goodputBar, pill, plainTable, timeColour } from "./parts.js";

export class TimeView {
  constructor(path, details) {
    this.host = h("div", { class: "stack" });
    this.update(details);
  }

  update(details) {
    const { goodput, timeline, attempts } = details;
    put(
      this.host,
      h("section", { class: "card" }, h("h2", null, "Where the time went"), goodputBar(goodput), parts(goodput)),
      h("section", { class: "card" }, h("h2", null, "Time line"), timeline.length ? line(timeline) : empty("No time line yet", "It begins when the run starts.")),
      attempts.length ? h("section", { class: "card flush" }, list(attempts, timeline, details.overview)) : null,
      details.commands.logs ? h("section", { class: "card stack" }, h("h2", null, "In a terminal"), Object.values(details.commands).filter(Boolean).map(command)) : null,
    );
  }
}

/** What starting and training consist of, and how often something failed. */
function parts(goodput) {
  const found = Object.entries(goodput.parts || {}).filter(([, seconds]) => Object.entries(seconds).some(([part, each]) => each > 0 && part !== "unmeasured")).map(([name, seconds]) =>
    [name, Object.entries(seconds).filter(([part, each]) => each > 0 && part !== "unmeasured").map(([part, each]) => `${part.replaceAll("_", " ")} ${duration(each)}`).join(" · ")]);
  if (goodput.failures) {
    const between = goodput.seconds_between_failures ? `, one every ${duration(goodput.seconds_between_failures)} on average` : "";
    found.push(["failures", `${goodput.failures}${between}`]);
  }
  return h("div", { style: { "margin-top": "12px" } }, facts([["total", duration(goodput.total)], ...found]));
}

function line(spans) {
  const first = Math.min(...spans.map((span) => span.began)), last = Math.max(...spans.map((span) => span.ended));
  const whole = Math.max(last - first, 1e-9);
  const attempts = [...new Set(spans.map((span) => span.attempt))].sort((a, b) => a - b);
  const isLong = whole > 86400;
  return h("div", null,
    h("div", { class: "timeline" }, attempts.map((attempt) => {
      const own = spans.filter((span) => span.attempt === attempt);
      const seconds = own.reduce((sum, span) => sum + span.ended - span.began, 0);
      return [
        h("span", { class: "small" }, attempt ? `Attempt ${attempt}` : "Before"),
        h("div", { class: "track" }, own.map((span) => h("span", {
          title: `${span.kind}: ${duration(span.ended - span.began)}, from ${clock(span.began)}`,
          style: { left: `${(100 * (span.began - first)) / whole}%`, width: `${(100 * (span.ended - span.began)) / whole}%`, background: timeColour(span.kind) },
        }))),
        h("span", { class: "small quiet" }, duration(seconds)),
      ];
    })),
    h("div", { class: "axis" }, [0, 0.5, 1].map((share) => h("span", null, (isLong ? date : clock)(first + share * whole)))),
  );
}

function list(attempts, timeline, run) {
  const titles = [["Attempt"], ["Verdict"], ["Took", "num"], ["Job start", "mono wide-only"], ["What happened"]];
  return plainTable(titles, attempts.map((attempt) => {
    const own = timeline.filter((span) => span.attempt === attempt.number);
    const seconds = attempt.ended ? attempt.ended - attempt.began : own.reduce((sum, span) => sum + span.ended - span.began, 0);
    const failure = attempt.failure;
    const isUnderWay = !run.is_over && attempt === attempts.at(-1);
    return [
      String(attempt.number),
      attempt.verdict ? pill(attempt.verdict) : isUnderWay ? pill("running") : h("span", { class: "quiet" }, "no verdict"),
      attempt.began && (attempt.ended || own.length) ? duration(seconds) : "–",
      plain(attempt.job_start),
      failure ? `${failure.rank === null ? "" : `rank ${failure.rank} on `}${plain(failure.host)}: ${plain(failure.text)}` : plain(attempt.reason),
    ];
  }));
}

export class SettingsView {
  constructor(path, details) {
    this.host = h("div", { class: "stack" });
    this.update(details);
  }

  update(details) {
    const signature = JSON.stringify([details.config, details.settings, details.command]);
    if (this.signature === signature) return;
    this.signature = signature;
    const { config, code } = details;
    const settings = flatten(details.settings);
    put(
      this.host,
      details.command ? h("section", { class: "card stack" }, h("h2", null, "Command"), command(details.command)) : null,
      h("div", { class: "columns" },
        h("div", { class: "stack" }, section("Configuration", Object.entries(config), "Pass it to run.config, and it appears here."), section("Code", [["commit", code.commit ? `${code.commit}${code.changed ? " + changes" : ""}` : ""], ["folder", code.folder], ["checkpoints", details.checkpoints.map((each) => `step ${each.step}${each.is_best ? " (best)" : ""}`).join(", ")], ["run folder", details.place]].filter(([, text]) => text), "Unknown.")),
        section("Settings of the job", settings, "None were given."),
      ),
    );
  }
}

function section(title, pairs, otherwise) {
  return h("section", { class: "card" }, h("h2", null, title), pairs.length ? facts(pairs.map(([name, any]) => [plain(name), plain(value(any))])) : h("p", { class: "quiet" }, otherwise));
}

/** Nested tables under names such as `job.nodes`; what is not set is left out. */
export function flatten(table, prefix = "") {
  return Object.entries(table || {}).flatMap(([name, any]) => {
    if (any && typeof any === "object" && !Array.isArray(any)) return flatten(any, `${prefix}${name}.`);
    return any === null || any === NOTHING || (Array.isArray(any) && !any.length) || any === "" ? [] : [[`${prefix}${name}`, any]];
  });
}
