// The loss curve: plain SVG, drawn anew when there are new points or the page has another width.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220;
const EDGE = { left: 48, right: 12, top: 10, bottom: 24 };

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

// About `wanted` round numbers between two values.
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let i = Math.ceil(low / unit); i * unit <= high + unit * 1e-9; i += 1) found.push(i * unit);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(unit))) };
}

// The range of the values, never empty.
function span(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  if (high > low) return [low, high];
  const half = Math.abs(low) * 0.05 || 0.5;
  return [low - half, high + half];
}

let drawn = "";

export function draw(svg, points) {
  const width = Math.max(svg.clientWidth, 200);
  const last = points.at(-1) ?? [0, 0];
  const key = `${width} ${points.length} ${points[0]} ${last}`;
  if (key === drawn) return;
  drawn = key;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  if (points.length < 2) {
    svg.replaceChildren(
      node("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, "no losses yet"),
    );
    return;
  }
  const [firstStep, lastStep] = span(points.map((point) => point[0]));
  const [low, high] = span(points.map((point) => point[1]));
  const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  const x = (value) => EDGE.left + ((value - firstStep) / (lastStep - firstStep)) * inner.width;
  const y = (value) => EDGE.top + (1 - (value - low) / (high - low)) * inner.height;
  const parts = [];
  const losses = ticks(low, high, 4);
  for (const value of losses.found) {
    const at = y(value).toFixed(1);
    parts.push(
      node("line", { x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at, class: "grid" }),
      node("text", { x: EDGE.left - 6, y: at, class: "loss-tick" }, value.toFixed(losses.digits)),
    );
  }
  for (const value of ticks(firstStep, lastStep, width < 480 ? 3 : 6).found) {
    if (!Number.isInteger(value)) continue;
    parts.push(
      node("text", { x: x(value).toFixed(1), y: HEIGHT - 6, class: "step-tick" }, String(value)),
    );
  }
  const path = points.map(([s, loss]) => `${x(s).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  parts.push(
    node("polyline", { points: path, class: "line" }),
    node("circle", { cx: x(last[0]).toFixed(1), cy: y(last[1]).toFixed(1), r: 3.5, class: "dot" }),
  );
  svg.replaceChildren(...parts);
}
