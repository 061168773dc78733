// Times of steps before and after a change, side by side, and how sure their difference is.

import { ChartCanvas, median } from "../charts/canvas.js";
import { element, setText, Twin } from "../charts/dom.js";
import { drawScene } from "../charts/scene.js";
import { count, milliseconds } from "../charts/theme.js";

const SIDES = ["before", "after"];

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
    this.twin.draw(() => found.sides.map((side, index) => [SIDES[index], String(side.buckets), side.caps, side.hook, String(side.step), String(side.ms.length), milliseconds(median(side.ms))]));
    this.chart.label(`${sentence(found)} Dots are steps, bars their medians.`);
    drawScene(this.chart, scene(found));
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

function scene({ sides }) {
  return {
    lanes: sides.map((side, index) => ({ key: SIDES[index], name: SIDES[index], note: count(side.buckets, "bucket"), strong: true, lines: () => lines(SIDES[index], side) })),
    height: 54,
    left: 74,
    label: "ms from step to step; upper dots are later steps",
    top: quantile(sides.flatMap((side) => side.ms), 0.97) * 1.08 || 1,
    // The two sides differ in shape, too.
    marks: sides.flatMap((side, lane) => [{ dots: side.ms, lane, role: `rank${lane}`, shape: lane, size: 2.4, rows: true }, { tick: median(side.ms), lane }]),
  };
}

function lines(name, side) {
  return [`${name} the change`, ["buckets", String(side.buckets)], ["caps", side.caps], ["comm hook", side.hook], ["from step", String(side.step)], ["steps", String(side.ms.length)], ["median", `${milliseconds(median(side.ms))} ms`]];
}
