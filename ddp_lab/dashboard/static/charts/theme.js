// Colours as the page has them, patterns and number formats.

import { COLOURS, PARTS, RAMP, RAMP_ON_DARK } from "../generated.js";

export function readTheme(root) {
  const style = getComputedStyle(root);
  const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ink: read("--ddp-ink", "#222"),
    line: read("--ddp-ink", "#222"),
    muted: read("--ddp-muted", "#666"),
    paper: read("--ddp-paper", "#fff"),
    grid: read("--ddp-grid", "#ddd"),
    band: read("--ddp-band", "#bbb"),
    panel: read("--ddp-panel", "#f3f3f3"),
    accent: read("--ddp-accent", COLOURS.forward),
    font: style.fontFamily || "sans-serif",
    dark: isLight(style.color),
  };
}

// Whether a computed colour is light, e.g. "rgb(224, 224, 224)" or "rgba(255, 255, 255, 0.87)".
function isLight(colour) {
  const [r, g, b] = (colour.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
  return 0.3 * r + 0.59 * g + 0.11 * b > 128;
}

// Fill styles by part, drawn at the canvas's own resolution.
export function makeFills(context, ratio) {
  return PARTS.map((part) => {
    if (part.pattern !== "hatch" && part.pattern !== "dots") return part.colour;
    const size = Math.round(6 * ratio);
    const tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.fillStyle = part.colour;
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = pen.fillStyle = "rgba(0, 0, 0, 0.62)";
    pen.lineWidth = 1.1 * ratio;
    if (part.pattern === "hatch") {
      pen.beginPath();
      for (const shift of [-size, 0, size]) {
        pen.moveTo(shift - 1, size + 1);
        pen.lineTo(shift + size + 1, -1);
      }
      pen.stroke();
    } else {
      pen.fillRect(size / 4, size / 4, 1.3 * ratio, 1.3 * ratio);
      pen.fillRect((size * 3) / 4, (size * 3) / 4, 1.3 * ratio, 1.3 * ratio);
    }
    const fill = context.createPattern(tile, "repeat");
    fill.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
    return fill;
  });
}

export function milliseconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return value.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0);
}

/** @type {[string, number][]} */
const SIZES = [
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
];

export function bytes(value) {
  if (!(value >= 0)) return "–";
  for (const [unit, factor] of SIZES) {
    if (value >= factor) return `${(value / factor).toFixed(value / factor < 10 ? 2 : 1)} ${unit}`;
  }
  return `${value} B`;
}

export function significant(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1) return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  return size >= 0.1 || size === 0 ? value.toFixed(3) : String(Number(value.toPrecision(2)));
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// A name with little room: the end of a module's name says more than its begin.
export function ending(name, most = 16) {
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

// The colour of a bucket by its place in launch order; the ramp works for all kinds of colour vision.
export function bucketColour(bucket, buckets, dark) {
  const ramp = dark ? RAMP_ON_DARK : RAMP;
  const at = (buckets < 2 ? 0.5 : bucket / (buckets - 1)) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  const [r, g, b] = ramp[low].map((value, index) => Math.round(value + (ramp[low + 1][index] - value) * (at - low)));
  return { fill: `rgb(${r}, ${g}, ${b})`, ink: 0.3 * r + 0.59 * g + 0.11 * b > 120 ? "#000" : "#fff" };
}

// 0.4 → "< 1 s", 12 → "12 s", 75 → "1 min 15 s", 7300 → "2 h 1 min"
export function duration(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 1) return "< 1 s";
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
