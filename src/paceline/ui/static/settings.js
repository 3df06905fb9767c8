// What a run was asked to do, and how its code differs from the project's code now.

import { h, put } from "./dom.js";
import { NOTHING, plain, value } from "./format.js";
import { command, empty, facts } from "./parts.js";
import { get } from "./source.js";

export class SettingsView {
  constructor(path, details) {
    this.diff = h("section", { class: "card flush" });
    this.host = h("div", { class: "stack" });
    this.update(details);
    this.read(path);
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
      this.diff,
    );
  }

  async read(path) {
    let text, note;
    try {
      ({ diff: text, note } = await get(`${path}/diff`));
    } catch (problem) {
      [text, note] = ["", problem.message];
    }
    if (note) put(this.diff, empty("The code can't be compared", plain(note)));
    else put(this.diff, text.trim() ? difference(text) : empty("The code has not changed", "The project is as it was when this run started."));
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

function difference(text) {
  const kind = (line) => (/^(\+\+\+|---|diff )/.test(line) ? "file" : { "+": "plus", "-": "minus", "@": "hunk" }[line[0]]);
  return h("div", { class: "diff", tabindex: 0, "aria-label": "Code changes since the run started" },
    h("h2", { style: { padding: "14px 16px 4px" } }, "Code changes since the run started"),
    text.split("\n").slice(0, 5000).map((line) => h("span", { class: kind(line) || null }, plain(line))));
}
