// The output of all ranks, merged, with search; new lines are appended.

import { h, later, put } from "./dom.js";
import { clock, count, date, plain } from "./format.js";
import { PALETTE } from "./charts.js";
import { empty } from "./parts.js";
import { get, isReport } from "./source.js";

const MAX_LINES = 3000; // on the page
const TAIL = 1000; // at first

export class LogView {
  /** `ask` lets the run's events bring the lines that are wanted: all of them, then the new ones. */
  constructor(path, details, ask) {
    this.ask = ask;
    this.all = []; // of a report
    this.lines = [];
    this.wanted = { rank: "", attempt: "", grep: "" };
    this.box = h("div", { class: "log", tabindex: 0, role: "log", "aria-label": "Output" });
    this.said = h("span", { class: "quiet small" });
    this.rank = h("select", { "aria-label": "Rank", on: { change: () => this.choose() } });
    this.attempt = h("select", { "aria-label": "Attempt", on: { change: () => this.choose() } });
    this.search = h("input", { type: "search", placeholder: "Search the log", "aria-label": "Search the log", on: { input: later(() => this.choose(), 250) } });
    this.host = h("div", null, h("div", { class: "toolbar" }, this.search, this.rank, this.attempt, this.said), h("div", { class: "card flush" }, this.box));
    this.update(details);
    if (isReport) this.read(path);
    else this.choose();
  }

  /** Offer the ranks and attempts that the run has. */
  update(details) {
    const { nodes, nproc, attempts } = details.overview;
    this.isOver = details.overview.is_over;
    offer(this.rank, "All ranks", Array.from({ length: Math.min(nodes * nproc, 1024) }, (_, rank) => [rank, `Rank ${rank}`]));
    offer(this.attempt, "All attempts", Array.from({ length: attempts }, (_, index) => [index + 1, `Attempt ${index + 1}`]));
    this.attempt.hidden = attempts < 2;
  }

  async read(path) {
    this.all = (await get(`${path}/log`)).lines;
    this.choose();
  }

  choose() {
    this.wanted = { rank: this.rank.value, attempt: this.attempt.value, grep: this.search.value };
    if (isReport) this.addLines({ whole: true, lines: this.all.filter((line) => this.matches(line)) });
    else this.ask(`&${new URLSearchParams({ log: 1, ...this.wanted })}`);
  }

  /** Append what the run has just written, or show these lines alone. */
  addLines({ whole, lines }) {
    const isAtEnd = whole || this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    if (whole) this.lines = [];
    if (!this.lines.length) put(this.box);
    this.box.append(...this.elements(lines, this.lines.at(-1)));
    this.lines.push(...lines);
    while (this.lines.length > MAX_LINES) {
      this.lines.shift();
      if (this.box.firstChild.matches(".attempt")) this.box.firstChild.remove();
      this.box.firstChild.remove();
    }
    this.isCut = whole ? lines.length >= TAIL : this.isCut;
    this.tell();
    if (isAtEnd) this.opened();
  }

  /** Go to the end, once the box has a height. */
  opened() {
    requestAnimationFrame(() => {
      this.box.scrollTop = this.box.scrollHeight;
    });
  }

  matches(line) {
    const { rank, attempt, grep } = this.wanted;
    return (rank === "" || line.rank === Number(rank)) && (attempt === "" || line.attempt === Number(attempt)) && plain(line.text).includes(grep);
  }

  /** Lines, and a line above each attempt but the first. */
  elements(lines, before) {
    let last = before?.attempt ?? 1;
    return lines.flatMap((line) => {
      const isNext = line.attempt > last && this.wanted.attempt === "";
      last = Math.max(last, line.attempt ?? last);
      return isNext ? [h("div", { class: "attempt" }, `Attempt ${line.attempt}`), this.element(line)] : [this.element(line)];
    });
  }

  element(line) {
    const rank = line.rank === null ? "" : String(line.rank);
    return h("div", { title: line.time ? date(line.time) : null },
      line.time ? h("time", null, clock(line.time)) : null,
      h("span", { class: "rank", title: rank && `Rank ${rank}`, style: { color: rank === "" ? "var(--quiet)" : `color-mix(in oklab, ${PALETTE[line.rank % PALETTE.length]} 80%, var(--text))` } }, rank),
      h("span", { class: "text" }, highlighted(plain(line.text), this.wanted.grep)),
    );
  }

  tell() {
    const { grep } = this.wanted;
    const length = this.lines.length;
    this.said.textContent = grep ? `${count(length, "line")} ${length === 1 ? "matches" : "match"}` : `${this.isCut ? "the last " : ""}${count(length, "line")}`;
    if (length) return;
    put(this.box, grep ? empty("No line matches", "Search for something else, or choose all ranks.") : empty("No output yet", this.isOver ? "The run has written nothing." : "Lines appear here as ranks write them."));
  }
}

function offer(select, all, choices) {
  if (select.options.length === choices.length + 1) return;
  const chosen = select.value;
  put(select, h("option", { value: "" }, all), choices.map(([value, text]) => h("option", { value }, text)));
  select.value = chosen;
}

function highlighted(text, part) {
  if (!part) return text;
  const found = [];
  let from = 0;
  for (let at = text.indexOf(part); at >= 0; at = text.indexOf(part, from)) {
    found.push(text.slice(from, at), h("mark", null, text.slice(at, at + part.length)));
    from = at + part.length;
  }
  return [...found, text.slice(from)];
}
