// Times of steps before and after a change, side by side, and how sure their difference is.

import { RANK_COLOURS } from "../generated.js";
import { ChartCanvas, median, roundMarks } from "../charts/canvas.js";
import { Twin } from "../charts/tables.js";
import { element, milliseconds, setText } from "../charts/theme.js";

const LEFT = 64;
const ROW = 54;
const AXIS = 34;
const SIDES = [{ name: "before", colour: RANK_COLOURS[0] }, { name: "after", colour: RANK_COLOURS[1] }];

export class BeforeAfterChart {
  // actions: {redraw(), say(text)}
  constructor(actions) {
    this.verdict = element("p", { class: "ddp-sentence ddp-verdict-line", role: "status" });
    this.chart = new ChartCanvas("Times of steps before and after the change", actions);
    this.twin = new Twin("Before and after the change", ["", "buckets", "caps", "comm hook", "from step", "steps", "median ms"]);
    this.node = element("div", { class: "ddp-before-after" });
  }

  // found: of the kernel: {text, sides: [{step, ms, buckets, caps, hook}], verdict, percent, low, high, medians}
  draw(found) {
    if (!found?.sides?.length) return this.node.replaceChildren();
    if (!this.node.firstChild) this.node.append(this.verdict, this.chart.node, this.twin.node);
    setText(this.verdict, sentence(found));
    this.verdict.dataset.verdict = found.verdict ?? "";
    this.twin.draw(() => found.sides.map((side, index) => [SIDES[index].name, String(side.buckets), side.caps, side.hook, String(side.step), String(side.ms.length), milliseconds(median(side.ms))]));
    const drawing = this.chart.begin(2 * ROW + AXIS);
    if (!drawing) return;
    this.chart.label(`${sentence(found)} Dots are steps, bars their medians.`);
    this.chart.finish(paint(drawing, found));
  }
}

function sentence(found) {
  if (!found.verdict) return found.text || "Let some steps pass to compare.";
  const sign = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)} %`;
  const [before, after] = found.medians.map(milliseconds);
  const counts = found.sides.map((side) => side.ms.length).join(" and ");
  return `A step takes ${before} ms before, ${after} ms after: ${sign(found.percent)} (99 %: ${sign(found.low)} to ${sign(found.high)}), ${found.verdict}. Medians of ${counts} steps.`;
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] ?? 0;
}

function paint({ pen, width, theme }, found) {
  const all = found.sides.flatMap((side) => side.ms);
  const top = quantile(all, 0.97) * 1.08 || 1;
  const x = (ms) => LEFT + (Math.min(ms, top) / top) * (width - LEFT - 12);
  const marks = roundMarks(top, Math.max(3, Math.floor(width / 130)));
  pen.font = `11px ${theme.font}`;
  pen.strokeStyle = theme.grid;
  pen.fillStyle = theme.muted;
  pen.textAlign = "center";
  for (const mark of marks) {
    const at = Math.round(x(mark)) + 0.5;
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, 2 * ROW);
    pen.stroke();
    pen.fillText(String(Number(mark.toPrecision(3))), at, 2 * ROW + 10);
  }
  pen.fillText("ms from step to step; upper dots are later steps", (width + LEFT) / 2, 2 * ROW + 26);
  return found.sides.map((side, index) => paintSide(pen, theme, side, SIDES[index], index * ROW, x, width));
}

function paintSide(pen, theme, side, { name, colour }, y, x, width) {
  pen.textAlign = "left";
  pen.fillStyle = theme.ink;
  pen.font = `600 12px ${theme.font}`;
  pen.fillText(name, 2, y + ROW / 2 - 8);
  pen.font = `11px ${theme.font}`;
  pen.fillStyle = theme.muted;
  pen.fillText(`${side.buckets} bucket${side.buckets === 1 ? "" : "s"}`, 2, y + ROW / 2 + 8);
  pen.fillStyle = colour;
  pen.globalAlpha = 0.8;
  side.ms.forEach((ms, index) => {
    pen.beginPath();
    const at = y + ROW - 8 - ((index + 0.5) / side.ms.length) * (ROW - 16);
    // The two sides differ in shape, too.
    if (name === "before") pen.arc(x(ms), at, 2.4, 0, 7);
    else pen.rect(x(ms) - 2.2, at - 2.2, 4.4, 4.4);
    pen.fill();
  });
  pen.globalAlpha = 1;
  const middle = median(side.ms);
  if (side.ms.length) {
    pen.fillStyle = theme.ink;
    pen.fillRect(x(middle) - 1.25, y + 3, 2.5, ROW - 6);
  }
  const lines = () => [`${name} the change`, ["buckets", String(side.buckets)], ["caps", side.caps], ["comm hook", side.hook], ["from step", String(side.step)], ["steps", String(side.ms.length)], ["median", `${milliseconds(middle)} ms`]];
  return { key: name, x: 0, y, width, height: ROW, lines };
}
