// Charts: Plotly draws them; where it is left out (a light report), they become still pictures.
//
// Curves arrive thinned out, so SVG draws them in a fraction of a second. Plotly's WebGL traces would need a policy that
// allows `eval`, and take many seconds where the browser has no GPU.

import { h, put } from "./dom.js";
import { canBeStill, stillPicture } from "./still.js";

export const PALETTE = ["#3b7ddd", "#e07b22", "#2e9e5b", "#d04a55", "#8b62cf", "#1399a8", "#b58a2a", "#c9589f", "#6b7a90", "#86a327"];

const isStill = document.documentElement.dataset.charts === "still";
const charts = new Map(); // element -> chart, those on the page
const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) charts.get(entry.target)?.show(entry.isIntersecting);
  },
  { rootMargin: "200px" },
);
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) charts.get(entry.target)?.resize();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

function redraw() {
  for (const chart of charts.values()) {
    chart.isStale = true;
    chart.draw();
  }
}

/** A chart that is drawn while it is in view. `set` takes a function that returns `{data, layout}`. */
export class Chart {
  constructor(kind = "") {
    this.host = h("div", { class: `chart ${kind}` });
    this.make = null;
    this.isShown = false;
    this.isStale = true;
    charts.set(this.host, this);
    observer.observe(this.host);
    resized.observe(this.host);
  }

  set(make) {
    this.make = make;
    this.isStale = true;
    this.draw();
  }

  show(isShown) {
    if (isShown === this.isShown) return;
    this.isShown = isShown;
    if (isShown && this.isStale) this.draw();
  }

  async draw() {
    if (!this.make || !this.isShown) return;
    const plotly = await loadPlotly();
    if (!this.make || !this.isShown || !this.host.clientWidth) return;
    this.isStale = false;
    if (!plotly) {
      put(this.host, stillPicture(this.make(), this.host.clientWidth, this.host.clientHeight));
      return;
    }
    const figure = this.make();
    await plotly.react(this.host, figure.data, styled(figure.layout), CONFIG);
  }

  resize() {
    if (!this.isShown || !this.make || !this.host.clientWidth) return;
    if (window.Plotly && this.host.classList.contains("js-plotly-plot")) window.Plotly.Plots.resize(this.host);
    else this.draw();
  }

  close() {
    this.make = null;
    if (window.Plotly && this.host.classList.contains("js-plotly-plot")) window.Plotly.purge(this.host);
    observer.unobserve(this.host);
    resized.unobserve(this.host);
    charts.delete(this.host);
  }
}

const CONFIG = {
  displaylogo: false, responsive: false, showTips: false, doubleClick: "reset", displayModeBar: false,
  topojsonURL: "", plotlyServerURL: "",
};

let revision = 0;

/** Give a layout the page's colours and fonts. */
function styled(layout) {
  const line = colour("line"), quiet = colour("quiet"), text = colour("text");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, tickfont: { color: quiet }, automargin: true };
  const made = {
    font: { family: "system-ui, sans-serif", size: 11, color: quiet },
    margin: { l: 48, r: 12, t: 8, b: 36 }, showlegend: false, colorway: PALETTE, hovermode: "closest", autosize: true,
    hoverlabel: { bgcolor: colour("card"), bordercolor: line, font: { color: text, size: 12 } },
    ...layout,
    datarevision: (revision += 1), // curves grow in place
  };
  Object.assign(made, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
  for (const name of new Set(["xaxis", "yaxis", ...Object.keys(made).filter((key) => /^[xy]axis\d*$/.test(key))])) {
    made[name] = { ...axis, ...made[name], gridcolor: line, zerolinecolor: line, linecolor: line };
  }
  return made;
}

let plotly = null;

/** Return Plotly, or null where there is none. The page's first paint doesn't wait for it. */
function loadPlotly() {
  if (isStill) return Promise.resolve(null);
  plotly ||= window.Plotly
    ? Promise.resolve(window.Plotly)
    : new Promise((resolve) => {
        document.head.append(
          h("script", { src: "plotly/plotly.min.js", on: { load: () => resolve(window.Plotly), error: () => resolve(null) } }),
        );
      });
  return plotly;
}

/** Return the value of a colour of style.css, such as `accent`. */
function colour(name) {
  probe.style.color = `var(--${name})`;
  if (!probe.isConnected) document.body.append(probe);
  return getComputedStyle(probe).color;
}

const probe = h("span", { hidden: true });

/** Whether this page can draw a figure: a light report has no Plotly. */
export function canBeDrawn(figure) {
  return !isStill || canBeStill(figure);
}

/** Plotly reads a few tags in texts. Names are not to contain any. */
export function literal(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

const HARMLESS = /<(?!br\/?>|\/?b>|extra>|\/extra>)/g;

/** A figure that somebody else has made, with the tags in its texts shown as they are, apart from line breaks. */
export function harmless(any) {
  if (typeof any === "string") return any.replace(HARMLESS, "&lt;");
  if (Array.isArray(any)) return any.map(harmless);
  if (any && typeof any === "object") return Object.fromEntries(Object.entries(any).map(([key, each]) => [key, harmless(each)]));
  return any;
}
