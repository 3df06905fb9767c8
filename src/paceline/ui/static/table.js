// A table that sorts by its columns and shows one page of its rows: ten thousand rows stay quick.

import { h, put } from "./dom.js";
import { whole } from "./format.js";

/**
 * `columns`: {name, title, cell(row), order(row), kind}; `order` makes a column sortable.
 * `state`: {sort, down, page}, kept by the caller so that it survives a visit to another page.
 */
export class Table {
  constructor({ columns, key, state, size = 50, kind = "", label = "" }) {
    Object.assign(this, { columns, key, state, size });
    this.rows = [];
    this.made = new Map(); // key -> {signature, element}
    this.heads = columns.map((column) => this.head(column));
    this.body = h("tbody", { on: { keydown: (event) => this.move(event) } });
    this.pager = h("div", { class: "pager" });
    const table = h("table", { class: kind, "aria-label": label || null }, h("thead", null, h("tr", null, this.heads)), this.body);
    this.host = h("div", { class: "card flush" }, h("div", { class: "table" }, table), this.pager);
  }

  head(column) {
    const content = column.order ? h("button", { on: { click: () => this.sortBy(column) } }, column.title) : column.title;
    return h("th", { class: column.kind || null, scope: "col", title: column.help || null }, content);
  }

  sortBy(column) {
    const again = this.state.sort === column.name;
    Object.assign(this.state, { sort: column.name, down: again ? !this.state.down : Boolean(column.downFirst), page: 0 });
    this.draw();
  }

  set(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const { state, size } = this;
    const column = this.columns.find((each) => each.name === state.sort);
    const sorted = column ? sort(this.rows, column.order, state.down) : this.rows;
    const pages = Math.max(1, Math.ceil(sorted.length / size));
    state.page = Math.min(state.page, pages - 1);
    this.shown = sorted.slice(state.page * size, (state.page + 1) * size);
    const kept = new Map();
    put(this.body, this.shown.map((row) => {
      const key = this.key(row), signature = JSON.stringify(row, (_, value) => (typeof value === "function" ? undefined : value));
      const old = this.made.get(key);
      const element = old && old.signature === signature ? old.element : this.row(row, key);
      kept.set(key, { signature, element });
      return element;
    }));
    this.made = kept;
    this.columns.forEach((each, index) => this.mark(each, this.heads[index]));
    this.drawPager(sorted.length, pages);
  }

  mark(column, head) {
    if (column.name === this.state.sort) head.setAttribute("aria-sort", this.state.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }

  row(row, key) {
    return h("tr", { "data-key": key }, this.columns.map((column) => h("td", { class: column.kind || null }, column.cell(row))));
  }

  drawPager(length, pages) {
    const { state, size } = this;
    this.pager.hidden = pages < 2;
    const turn = (by) => () => {
      state.page += by;
      this.draw();
      this.host.scrollIntoView({ block: "nearest" });
    };
    const first = state.page * size;
    put(
      this.pager,
      h("span", null, `${whole(first + 1)}–${whole(Math.min(first + size, length))} of ${whole(length)}`),
      h("button", { disabled: state.page === 0, on: { click: turn(-1) }, "aria-label": "Previous page" }, "‹ Previous"),
      h("button", { disabled: state.page >= pages - 1, on: { click: turn(1) }, "aria-label": "Next page" }, "Next ›"),
    );
  }

  /** Up and down go from row to row. */
  move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest("tr");
    if (!step || !row || event.target.tagName === "SELECT") return;
    event.preventDefault();
    (step > 0 ? row.nextElementSibling : row.previousElementSibling)?.querySelector("a")?.focus();
  }
}

/** Sort by what `order` returns: numbers by size, texts by letters, what is unknown last in either direction. */
export function sort(rows, order, down) {
  const isUnknown = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  return rows
    .map((row) => [order(row), row])
    .sort(([a], [b]) => isUnknown(a) - isUnknown(b) || (isUnknown(a) ? 0 : compare(a, b) * (down ? -1 : 1)))
    .map(([, row]) => row);
}
