// Still pictures of the figures that Plotly draws elsewhere: lines and dots on one pair of axes.

import { s } from "./dom.js";
import { clock } from "./format.js";

const MARGIN = { left: 54, right: 12, top: 10, bottom: 40 };
const COLOUR = "var(--accent)";

/** Whether there is a still picture of a figure. */
export function canBeStill(figure) {
  return figure.layout.xaxis?.type !== "category" && figure.data.every((trace) => trace.type === "scatter" && !/\d/.test(trace.xaxis || ""));
}

/** Return a figure as an SVG element of this size. */
export function stillPicture({ data, layout }, width, height) {
  const picture = s("svg", { class: "still", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const { xaxis = {}, yaxis = {} } = layout;
  const left = MARGIN.left, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const all = (key, axis) => [...data.flatMap((trace) => trace[key]), ...(axis.range || [])];
  const x = scale(all("x", xaxis), xaxis.type, left, right);
  const y = scale(all("y", yaxis), yaxis.type, bottom, MARGIN.top);
  for (const [at, text] of y.ticks) {
    picture.append(s("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }), label(text, left - 6, at + 4, "end", 9));
  }
  for (const [at, text] of x.ticks) picture.append(label(text + (xaxis.ticksuffix || ""), at, bottom + 16, "middle", 10));
  const title = typeof xaxis.title === "string" ? xaxis.title : xaxis.title?.text;
  if (title) picture.append(label(title, (left + right) / 2, height - 6, "middle", 30));
  for (const trace of data) draw(picture, trace, x, y);
  return picture;
}

function draw(picture, trace, x, y) {
  const ys = trace.y.map(y.at);
  const points = trace.x.map((value, index) => [x.at(value), ys[index]]).filter((point) => point.every(Number.isFinite));
  const colour = [trace.line?.color, trace.marker?.color].find((each) => typeof each === "string") || COLOUR;
  if ((trace.mode || "lines").includes("lines") && points.length > 1) {
    const path = points.map((point) => point.map((each) => each.toFixed(1)).join(",")).join("L");
    picture.append(s("path", { d: `M${path}`, fill: "none", stroke: colour, "stroke-width": trace.line?.width || 1.5, "stroke-linejoin": "round", opacity: trace.opacity ?? 1 }));
  }
  if ((trace.mode || "").includes("markers")) {
    for (const [cx, cy] of points) picture.append(s("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: 2.5, fill: colour, opacity: 0.7 }));
  }
}

/** Place values between two ends: by size, by logarithm or by time. */
function scale(values, type, from, to) {
  const number = { log: (value) => Math.log10(value), date: Date.parse }[type] || Number;
  const known = values.map(number).filter(Number.isFinite);
  let low = Math.min(...known), high = Math.max(...known);
  if (!known.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const place = (value) => from + ((to - from) * (value - low)) / (high - low);
  const name = (value) => (type === "date" ? clock(value / 1000) : short(type === "log" ? 10 ** value : value));
  return { at: (value) => place(number(value)), ticks: ticks(low, high).map((value) => [place(value), name(value)]) };
}

function ticks(low, high) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) found.push(index * step);
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return value.toExponential(1).replace("e+", "e");
  return size && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

function label(text, x, y, anchor, length) {
  return s("text", { x, y, "text-anchor": anchor }, text.length > length ? `${text.slice(0, length - 1)}…` : text);
}
