// Still pictures of the figures that Plotly draws elsewhere: lines, dots, bars and parallel coordinates.

import { s } from "./dom.js";
import { clock } from "./format.js";

const MARGIN = { left: 54, right: 12, top: 10, bottom: 26 };
const COLOUR = "var(--accent)";

/** Return a figure as an SVG element of this size. */
export function stillPicture(figure, width, height) {
  const picture = s("svg", { class: "still", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const layout = figure.layout || {};
  const coordinates = figure.data.find((trace) => trace.type === "parcoords");
  if (coordinates) {
    parallel(picture, coordinates, width, height);
    return picture;
  }
  const pairs = new Map();
  for (const trace of figure.data) {
    const pair = `${trace.xaxis || "x"} ${trace.yaxis || "y"}`;
    pairs.set(pair, [...(pairs.get(pair) || []), trace]);
  }
  for (const [pair, traces] of pairs) {
    const [x, y] = pair.split(" ").map((name) => layout[name.replace(/^([xy])/, "$1axis")] || {});
    panel(picture, traces, x, y, width, height, layout);
  }
  return picture;
}

function panel(picture, traces, xaxis, yaxis, width, height, layout) {
  const [first, last] = xaxis.domain || [0, 1];
  const area = { left: first * width + MARGIN.left, right: last * width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom - (xaxis.title ? 14 : 0) };
  const isSideways = traces.some((trace) => trace.orientation === "h");
  if (isSideways) area.left += 60;
  const lists = (key, axis) => [...traces.flatMap((trace) => list(trace[key])), ...(axis.range || [])];
  const withZero = (values, is) => (is ? [0, ...values] : values);
  const hasBars = traces.some((trace) => trace.type === "bar");
  const x = marked(scale(withZero(lists("x", xaxis), hasBars && isSideways), xaxis.type, area.left, area.right), xaxis);
  const y = marked(scale(withZero(lists("y", yaxis), hasBars && !isSideways), yaxis.type, area.bottom, area.top), yaxis);
  for (const [at, text] of y.ticks) {
    picture.append(s("line", { class: "grid", x1: area.left, x2: area.right, y1: at, y2: at }), label(text, area.left - 6, at + 4, "end", isSideways ? 18 : 9));
  }
  for (const [at, text] of x.ticks) picture.append(label(text + (xaxis.ticksuffix || ""), at, area.bottom + 16, "middle", 10));
  for (const shape of layout.shapes || []) if (shape.type === "line") picture.append(s("line", { x1: x.at(shape.x0), x2: x.at(shape.x1), y1: y.at(shape.y0), y2: y.at(shape.y1), stroke: "var(--quiet)" }));
  const title = typeof xaxis.title === "string" ? xaxis.title : xaxis.title?.text;
  if (title) picture.append(label(title, (area.left + area.right) / 2, height - 6, "middle", 30));
  for (const trace of traces) draw(picture, trace, x, y, area, isSideways);
  for (const note of layout.annotations || []) if (note.xref !== "paper" && note.text) picture.append(label(note.text, x.at(note.x) - 4, y.at(note.y) + 4, "end", 12));
}

function draw(picture, trace, x, y, area, isSideways) {
  const xs = list(trace.x).map(x.at), ys = list(trace.y).map(y.at);
  if (trace.type === "bar") {
    const size = (0.7 * (isSideways ? area.bottom - area.top : area.right - area.left)) / Math.max(1, xs.length);
    xs.forEach((at, index) => {
      const box = isSideways
        ? { x: x.at(0), y: ys[index] - size / 2, width: Math.max(0, at - x.at(0)), height: size }
        : { x: at - size / 2, y: ys[index], width: size, height: Math.max(0, y.at(0) - ys[index]) };
      picture.append(s("rect", { ...box, rx: 3, fill: COLOUR }));
    });
    return;
  }
  const points = xs.map((at, index) => [at, ys[index]]).filter((point) => point.every(Number.isFinite));
  const fill = colourOf(trace);
  if ((trace.mode || "lines").includes("lines") && points.length > 1) {
    const path = points.map((point) => point.map((each) => each.toFixed(1)).join(",")).join("L");
    picture.append(s("path", { d: `M${path}`, fill: "none", stroke: fill, "stroke-width": trace.line?.width || 1.5, "stroke-linejoin": "round", opacity: trace.opacity ?? 1 }));
  }
  if ((trace.mode || "").includes("markers")) {
    for (const [cx, cy] of points) picture.append(s("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: 2.5, fill, opacity: 0.7 }));
  }
}

function parallel(picture, trace, width, height) {
  const axes = trace.dimensions.map((dimension, index, all) => {
    const x = MARGIN.left + ((width - 2 * MARGIN.left) * index) / Math.max(1, all.length - 1);
    const values = list(dimension.values);
    return { x, values, y: scale([...values, ...(dimension.range || [])], "linear", height - 24, 30), dimension };
  });
  const order = list(trace.line?.color).map(Number);
  const best = trace.line?.reversescale ? Math.min(...order) : Math.max(...order);
  const spread = Math.max(...order) - Math.min(...order) || 1;
  for (let row = 0; row < (axes[0]?.values.length || 0); row += 1) {
    const near = order.length ? 1 - Math.abs(order[row] - best) / spread : 0.5;
    const path = axes.map((axis) => `${axis.x.toFixed(1)},${axis.y.at(axis.values[row]).toFixed(1)}`).join("L");
    picture.append(s("path", { d: `M${path}`, fill: "none", stroke: COLOUR, "stroke-width": 1 + near, opacity: (0.12 + 0.68 * near ** 2).toFixed(2) }));
  }
  for (const axis of axes) {
    picture.append(s("line", { x1: axis.x, x2: axis.x, y1: 30, y2: height - 24, stroke: "var(--quiet)" }));
    picture.append(label(axis.dimension.label || "", axis.x, 16, "middle", 16));
    const texts = axis.dimension.ticktext ? list(axis.dimension.tickvals).map((at, index) => [axis.y.at(at), axis.dimension.ticktext[index]]) : axis.y.ticks;
    for (const [at, text] of texts) picture.append(label(text, axis.x - 5, at + 4, "end", 9));
  }
}

/** Place values between two ends: by size, by logarithm, or evenly if they are words. */
function scale(values, type, from, to) {
  if (type === "date") return timeScale(values.map(Date.parse), from, to);
  const numbers = values.map(Number);
  const isWords = type === "category" || (type !== "log" && values.some((value) => value !== null && !Number.isFinite(Number(value)) && !Number.isNaN(value)));
  if (isWords) {
    const words = [...new Set(values.map(String))];
    const at = (value) => from + ((to - from) * (words.indexOf(String(value)) + 0.5)) / words.length;
    return { at, ticks: words.slice(0, 12).map((word) => [at(word), word]) };
  }
  const isLog = type === "log";
  const known = numbers.filter((value) => Number.isFinite(value) && (!isLog || value > 0)).map((value) => (isLog ? Math.log10(value) : value));
  let low = Math.min(...known), high = Math.max(...known);
  if (!known.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const place = (value) => from + ((to - from) * (value - low)) / (high - low);
  const at = (value) => place(isLog ? Math.log10(Number(value)) : Number(value));
  return { at, ticks: ticks(low, high, isLog).map((value) => [place(value), short(isLog ? 10 ** value : value)]) };
}

/** Place times; the marks are evenly spread. */
function timeScale(times, from, to) {
  const low = Math.min(...times), high = Math.max(...times, low + 1000);
  const at = (value) => from + ((to - from) * (Date.parse(value) - low)) / (high - low);
  const marks = [0.1, 0.5, 0.9].map((share) => [from + share * (to - from), clock((low + share * (high - low)) / 1000)]);
  return { at, ticks: times.length ? marks : [] };
}

/** The marks that a figure asks for, instead of round numbers. */
function marked(made, axis) {
  if (axis.showticklabels === false || axis.visible === false) return { ...made, ticks: [] };
  return axis.ticktext ? { ...made, ticks: list(axis.tickvals).map((value, index) => [made.at(value), axis.ticktext[index]]) } : made;
}

function ticks(low, high, isLog) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  if (isLog && high - low >= 2) step = Math.max(1, Math.round(step));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) found.push(index * step);
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return size && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

function colourOf(trace) {
  for (const found of [trace.line?.color, trace.marker?.color]) if (typeof found === "string") return found;
  return COLOUR;
}

function label(text, x, y, anchor, length) {
  const words = String(text).replace(/<br\/?>/g, " ");
  return s("text", { x, y, "text-anchor": anchor }, words.length > length ? `${words.slice(0, length - 1)}…` : words);
}

/** An array as a list; Plotly may pack one as base64. */
function list(any) {
  if (Array.isArray(any)) return any;
  if (!any || typeof any !== "object" || !any.bdata) return [];
  const kinds = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array, u2: Uint16Array, i1: Int8Array, u1: Uint8Array };
  const packed = Uint8Array.from(atob(any.bdata), (letter) => letter.charCodeAt(0));
  return kinds[any.dtype] ? Array.from(new kinds[any.dtype](packed.buffer)) : [];
}
