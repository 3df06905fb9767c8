// The curves of one run.

import { h, later, put } from "./dom.js";
import { CurveGrid, curveControls, extend, lineColour, ordered } from "./curves.js";
import { empty } from "./parts.js";

const options = { weight: 0, axis: "step", log: false }; // kept from run to run
const FEW = 6; // metrics that need no search field

export class MetricsView {
  constructor() {
    this.curves = new Map();
    this.text = "";
    this.grid = new CurveGrid(options, (name) => [{ label: "", curve: this.curves.get(name), colour: lineColour(0) }]);
    this.search = h("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", on: { input: later(() => this.filter(), 80) } });
    this.toolbar = h("div", { class: "toolbar" }, curveControls(options, () => this.grid.refresh()), h("span", { class: "spacer" }), this.search);
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

  filter() {
    this.text = this.search.value.toLowerCase();
    this.draw();
  }

  draw() {
    const names = ordered(this.curves.keys());
    this.search.hidden = names.length <= FEW;
    const shown = names.filter((name) => name.toLowerCase().includes(this.text));
    this.grid.show(shown);
    if (!names.length) put(this.host, empty("No metrics yet", "Numbers that your script logs appear here as curves:", "run.log(loss=loss)"));
    else put(this.host, this.toolbar, shown.length ? this.grid.host : empty("No metric matches", "Change the filter."));
  }

  update() {}

  close() {
    this.grid.close();
  }
}
