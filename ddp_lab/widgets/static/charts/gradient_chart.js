// Norms of the gradients over the watched steps, by rank and averaged; below them the noise scale.

import { COLOURS, RANK_COLOURS } from "../generated.js";
import { SCALE_LEFT, SCALE_RIGHT, paintScale, roundMarks } from "./canvas.js";
import { count, significant } from "./theme.js";

const TOP = 26;
const [PLOT, GAP, STRIP, AXIS] = [150, 28, 56, 34];
const MOST_LINES = 8;
const WIDE_RANGE = 50; // largest over smallest norm from which the scale is logarithmic

export const CHART_HEIGHT = TOP + PLOT + GAP + STRIP + AXIS;

// steps: of the kernel, oldest first; shown: the chosen step; choose(step). Returns the regions for ChartCanvas.
export function paintNorms({ pen, width, theme }, { steps, ranks }, shown, choose) {
  const room = width - SCALE_LEFT - SCALE_RIGHT;
  const wide = Math.min(room / Math.max(steps.length - 1, 1), 40);
  const x = (index) => SCALE_LEFT + 4 + index * Math.min(wide, (room - 8) / Math.max(steps.length - 1, 1));
  const [y, marks, log] = scale(steps.flatMap((one) => [...one.before, one.after]));
  paintScale(pen, theme, width, marks.map((mark) => [y(mark), significant(mark)]), `L2 norm${log ? " (log)" : ""}`, TOP, PLOT);
  band(pen, theme, steps, x, y);
  if (ranks.length <= MOST_LINES) ranks.forEach((_, row) => line(pen, steps.map((one, index) => [x(index), one.before[row]]), y, RANK_COLOURS[row], 1.25, row));
  line(pen, steps.map((one, index) => [x(index), one.after]), y, theme.ink, 2.25, -1);
  steps.forEach((one, index) => one.bad && flag(pen, x(index), one.bad.kind));
  const top = TOP + PLOT + GAP;
  const known = steps.map((one) => one.noise).filter((value) => value !== null).sort((a, b) => a - b);
  const most = Math.min(known.at(-1) ?? 1, 1.6 * (known[Math.floor(0.95 * (known.length - 1))] ?? 1)) || 1;
  const level = (value) => top + STRIP * (1 - Math.min(value, most) / most);
  paintScale(pen, theme, width, roundMarks(most, 2).map((mark) => [level(mark), significant(mark)]), "noise", top, STRIP);
  line(pen, steps.map((one, index) => [x(index), one.noise]), level, COLOURS.noise, 1.75, -1);
  axis(pen, theme, steps, x, top + STRIP);
  const each = steps.length > 1 ? x(1) - x(0) : 20;
  return steps.map((one, index) => {
    if (one.step === shown) {
      pen.fillStyle = theme.ink;
      pen.fillRect(x(index) - 3, top + STRIP + 2, 6, 3);
    }
    return { key: `watched ${one.step}`, x: x(index) - each / 2, y: TOP - 10, width: each, height: PLOT + GAP + STRIP + 10, lines: () => lines(one, ranks), act: () => choose(one.step) };
  });
}

function scale(values) {
  const known = values.filter((value) => value !== null && value > 0);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (!known.length) return [() => TOP + PLOT, [0], false];
  if (high / low < WIDE_RANGE) return [(value) => TOP + PLOT * (1 - value / (high * 1.05)), roundMarks(high * 1.05), false];
  const [bottom, top] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const marks = Array.from({ length: top - bottom + 1 }, (_, index) => 10 ** (bottom + index));
  return [(value) => TOP + PLOT * (1 - (Math.log10(Math.max(value, 10 ** bottom)) - bottom) / (top - bottom)), marks.filter((_, index) => index % Math.ceil(marks.length / 6) === 0), true];
}

// From the smallest to the largest rank's norm.
function band(pen, theme, steps, x, y) {
  const rows = steps.map((one, index) => [x(index), one.before.filter((value) => value !== null)]).filter(([, known]) => known.length);
  pen.fillStyle = theme.band;
  pen.globalAlpha = 0.35;
  pen.beginPath();
  for (const [at, known] of rows) pen.lineTo(at, y(Math.max(...known)));
  for (const [at, known] of rows.toReversed()) pen.lineTo(at, y(Math.min(...known)));
  pen.fill();
  pen.globalAlpha = 1;
}

// Points whose value is null are gaps; row: of the rank, whose dots have a shape of their own.
function line(pen, points, y, colour, thick, row) {
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = thick;
  pen.setLineDash(row < 0 ? [] : [[], [5, 2], [2, 2], [7, 2, 2, 2]][row % 4]);
  pen.beginPath();
  let open = false;
  for (const [x, value] of points) {
    if (value === null) open = false;
    else {
      if (open) pen.lineTo(x, y(value));
      else pen.moveTo(x, y(value));
      open = true;
    }
  }
  pen.stroke();
  pen.setLineDash([]);
  if (points.length <= 40) for (const [x, value] of points) if (value !== null) pen.fillRect(x - 1.75, y(value) - 1.75, 3.5, 3.5);
}

// A step whose gradients were not finite.
function flag(pen, x, kind) {
  pen.fillStyle = COLOURS.bad;
  pen.beginPath();
  pen.moveTo(x - 5, TOP - 1);
  pen.lineTo(x + 5, TOP - 1);
  pen.lineTo(x, TOP - 9);
  pen.fill();
  pen.fillRect(x - 0.75, TOP, 1.5, PLOT);
  pen.textAlign = "center";
  pen.fillText(kind, x, TOP - 14);
}

function axis(pen, theme, steps, x, y) {
  pen.fillStyle = theme.muted;
  pen.textAlign = "center";
  let free = -Infinity;
  steps.forEach((one, index) => {
    if (x(index) < free) return;
    pen.fillText(String(one.step), x(index), y + 13);
    free = x(index) + 56;
  });
  pen.textAlign = "left";
  pen.fillText(`step (${count(steps.length, "watched step")}); noise: scale in batches of a rank, over 20 watched steps`, SCALE_LEFT, y + 27);
}

function lines(one, ranks) {
  const bad = one.bad ? [[one.bad.kind, one.bad.parameter ? `first in ${one.bad.parameter}, rank ${one.bad.rank}` : "in the average alone"]] : [];
  const shown = ranks.slice(0, 8).map((rank, row) => [`rank ${rank}, before`, value(one.before[row])]);
  return [`step ${one.step}`, ...bad, ...shown, ["average", value(one.after)], ["noise scale", value(one.noise)], ["watching took", `${one.ms.toFixed(2)} ms`]];
}

function value(number) {
  return number === null ? "–" : significant(number);
}
