// The loss curve: plain SVG, drawn anew when there are new points or the page has another width.

import { count, loss as lossText } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 240;
const EDGE = { left: 52, right: 14, top: 14, bottom: 26 };
// What learners report may be absurd: it must neither stop the page nor be drawn for ever.
const LARGEST = 1e100;
const SMALLEST_SPAN = 1e-6;

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

// The distance of about `wanted` round numbers between two values.
function unitOf(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
}

// Those numbers, and how many digits they have behind the point.
function ticks(low, high, wanted) {
  const unit = unitOf(low, high, wanted);
  const found = [];
  for (let i = Math.ceil(low / unit); i * unit <= high + unit * 1e-9; i += 1) found.push(i * unit);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(unit))) };
}

// The range of the values, never too small to be divided.
function span(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const largest = Math.max(Math.abs(low), Math.abs(high));
  if (high - low > Math.max(SMALLEST_SPAN, largest * SMALLEST_SPAN)) return [low, high];
  const half = Math.max(largest * 0.05, 0.5);
  return [low - half, high + half];
}

// The same, a little wider, so that it ends near a tick.
function rounded([low, high]) {
  const part = unitOf(low, high, 4) / 2;
  return [Math.floor(low / part) * part, Math.ceil(high / part) * part];
}

const tame = ([step, loss]) => [step, Math.max(-LARGEST, Math.min(LARGEST, loss))];

let drawn = "";
let shown = null; // what is drawn, for whoever points at it
let pointed = null; // where somebody points, in pixels from the left

export function draw(svg, all) {
  const points = all.map(tame);
  const width = Math.max(svg.clientWidth, 200);
  const last = points.at(-1) ?? [0, 0];
  const key = `${width} ${points.length} ${points[0]} ${last}`;
  if (key === drawn) return;
  drawn = key;
  shown = null;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  if (!points.length) {
    svg.replaceChildren(
      node("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, "no losses yet"),
    );
    return;
  }
  const [firstStep, lastStep] = span(points.map((point) => point[0]));
  const [low, high] = rounded(span(points.map((point) => point[1])));
  const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  const x = (value) => EDGE.left + ((value - firstStep) / (lastStep - firstStep)) * inner.width;
  const y = (value) => EDGE.top + (1 - (value - low) / (high - low)) * inner.height;
  const bottom = HEIGHT - EDGE.bottom;
  const path = points.map(([s, loss]) => `${x(s).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const ends = [x(points[0][0]).toFixed(1), x(last[0]).toFixed(1)];
  svg.replaceChildren(
    ...axes({ x, y, width, low, high, firstStep, lastStep }),
    node("polygon", { points: `${ends[0]},${bottom} ${path} ${ends[1]},${bottom}`, class: "area" }),
    node("polyline", { points: path, class: "line" }),
    node("circle", { cx: ends[1], cy: y(last[1]).toFixed(1), r: 4, class: "dot" }),
  );
  shown = { points, x, y, width };
  point(svg, pointed);
}

function axes({ x, y, width, low, high, firstStep, lastStep }) {
  const parts = [];
  const losses = ticks(low, high, 4);
  for (const value of losses.found) {
    const at = y(value).toFixed(1);
    parts.push(
      node("line", { x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at, class: "grid" }),
      node("text", { x: EDGE.left - 8, y: at, class: "loss-tick" }, lossText(value, losses.digits)),
    );
  }
  for (const value of ticks(firstStep, lastStep, width < 480 ? 3 : 6).found) {
    if (!Number.isInteger(value) || value < 0) continue;
    parts.push(
      node("text", { x: x(value).toFixed(1), y: HEIGHT - 7, class: "step-tick" }, count(value)),
    );
  }
  return parts;
}

// Shows the loss at the step that somebody points at; null for nobody.
function point(svg, at) {
  pointed = at;
  svg.querySelector(".probe")?.remove();
  if (at === null || shown === null) return;
  const { points, x, y, width } = shown;
  const far = ([step]) => Math.abs(x(step) - at);
  const nearest = points.reduce((best, one) => (far(one) < far(best) ? one : best));
  const left = x(nearest[0]);
  const group = node("g", { class: "probe" });
  const text = `${lossText(nearest[1], 4)} at ${count(nearest[0])}`;
  group.append(
    node("line", { x1: left, x2: left, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
    node("circle", { cx: left, cy: y(nearest[1]), r: 4 }),
    node("text", { x: Math.min(Math.max(left, 110), width - 70), y: EDGE.top - 2 }, text),
  );
  svg.append(group);
}

export function listen(svg) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    if (box.width && shown) point(svg, ((event.clientX - box.left) / box.width) * shown.width);
  });
  svg.addEventListener("pointerleave", () => point(svg, null));
}
