// Overlap: what each step consists of, as columns over steps; how far each is from the floor.

import { ChartCanvas, SCALE_LEFT, SCALE_RIGHT, median, paintScale, roundMarks } from "../charts/canvas.js";
import { binned, judged } from "../steps/many_steps.js";
import { Twin } from "../charts/tables.js";
import { PHASES } from "../generated.js";
import { element, milliseconds, setText } from "../charts/theme.js";

const TOP = 10;
const [PLOT, GAP, STRIP, AXIS] = [210, 26, 64, 34];
const SUMMARY_STEPS = 100;
const percent = (value) => (Number.isNaN(value) ? "–" : `${(100 * value).toFixed(0)} %`);

export class OverlapView {
  // actions: {choose(step), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.summary = element("div", { class: "ddp-summary", role: "status" });
    this.chart = new ChartCanvas("What each step consists of, in milliseconds, and its efficiency", actions);
    const keys = PHASES.map((one) =>
      element("li", { title: one.title }, element("i", { class: "ddp-key", style: `background: ${one.colour}`, "aria-hidden": "true" }), one.name),
    );
    this.twin = new Twin("Milliseconds of the newest steps, medians over the ranks", ["step", "ms", ...PHASES.map((one) => one.name), "efficiency"]);
    this.node = element(
      "section",
      { class: "ddp-overlap", "aria-label": "overlap of computation and communication" },
      element("h4", {}, "Overlap"),
      this.summary,
      element("ul", { class: "ddp-legend", "aria-label": "legend, from the bottom of a column to its top" }, ...keys),
      this.chart.node,
      this.twin.node,
    );
  }

  // records: those of the model, in order
  draw(records, shown) {
    const rows = records.filter((one) => !Number.isNaN(one.phases[0])).map(rowOf);
    const text = summarise(judged(rows).slice(-SUMMARY_STEPS));
    setText(this.summary, text);
    this.chart.label(`Overlap. ${text}`);
    this.twin.draw(() => rows.slice(-100).reverse().map((row) => [
      String(row.step), milliseconds(row.total), ...PHASES.map(({ key }) => milliseconds(row[key])), percent(efficiency(row)),
    ]));
    const drawing = rows.length ? this.chart.begin(TOP + PLOT + GAP + STRIP + AXIS) : null;
    if (drawing) this.chart.finish(this.paint(drawing, rows, shown));
  }

  paint({ pen, width, theme }, rows, shown) {
    const room = width - SCALE_LEFT - SCALE_RIGHT;
    const bins = binned(rows, room / 4, ["total", ...PHASES.map((one) => one.key)]);
    const totals = bins.map((one) => one.total).sort((a, b) => a - b);
    // A few long steps (the first ones) must not flatten all others.
    const top = Math.min(totals.at(-1), 1.6 * totals[Math.floor(0.95 * (totals.length - 1))]) || 1;
    const y = (value) => TOP + PLOT * (1 - Math.min(value, top) / top);
    paintScale(pen, theme, width, roundMarks(top).map((mark) => [y(mark), String(Number(mark.toPrecision(3)))]), "ms a step", TOP, PLOT);
    const stripTop = TOP + PLOT + GAP;
    const level = (share) => stripTop + STRIP * (1 - Math.min(Math.max(share, 0), 1));
    paintScale(pen, theme, width, [0, 0.5, 1].map((mark) => [level(mark), `${mark * 100} %`]), "efficiency", stripTop, STRIP);
    const step = Math.min(room / bins.length, 40);
    const regions = bins.map((bin, index) => {
      const x = SCALE_LEFT + index * step;
      let base = 0;
      for (const { key, colour } of PHASES) {
        pen.fillStyle = colour;
        const upper = y(base + bin[key]);
        pen.fillRect(x, upper, Math.max(step - (step > 5 ? 1 : 0), 1), y(base) - upper);
        base += bin[key];
      }
      if (bin.total > top) paintCut(pen, theme, x + step / 2);
      if (bin.first <= shown && shown <= bin.last) {
        pen.fillStyle = theme.ink;
        pen.fillRect(x, TOP + PLOT + 2, Math.max(step - 1, 2), 3);
      }
      return { key: `step ${bin.first}`, x, y: TOP, width: step, height: PLOT + GAP + STRIP, lines: () => lines(bin), act: () => this.actions.choose(bin.last) };
    });
    this.paintLine(pen, theme, bins.map((bin, index) => [SCALE_LEFT + (index + 0.5) * step, level(efficiency(bin))]));
    paintSteps(pen, theme, bins, step, TOP + PLOT + GAP + STRIP);
    return regions;
  }

  paintLine(pen, theme, points) {
    pen.strokeStyle = theme.ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const [x, y] of points) pen.lineTo(x, y);
    pen.stroke();
    if (points.length > 40) return;
    pen.fillStyle = theme.ink;
    for (const [x, y] of points) {
      pen.beginPath();
      pen.arc(x, y, 2.5, 0, 7);
      pen.fill();
    }
  }
}

// A step that has ended: ms of each phase by its key, and their sum.
function rowOf({ step, generation, whole, phases }) {
  const parts = PHASES.map(({ key }, index) => [key, phases[index]]);
  return { step, generation, whole, total: phases.reduce((sum, ms) => sum + ms, 0), ...Object.fromEntries(parts) };
}

// Share of the step that would remain without exposed communication: 1 is the floor.
function efficiency(one) {
  return one.total > 0 ? (one.total - one.exposed) / one.total : NaN;
}

// A column that goes on beyond the scale.
function paintCut(pen, theme, x) {
  pen.fillStyle = theme.ink;
  pen.beginPath();
  pen.moveTo(x - 3, TOP + 1);
  pen.lineTo(x + 3, TOP + 1);
  pen.lineTo(x, TOP - 5);
  pen.fill();
}

function paintSteps(pen, theme, bins, step, y) {
  pen.fillStyle = theme.muted;
  pen.textAlign = "center";
  const every = Math.max(1, Math.ceil(56 / step));
  bins.forEach((bin, index) => {
    if (index % every === 0) pen.fillText(String(bin.first), SCALE_LEFT + (index + 0.5) * step, y + 12);
  });
  const each = bins.length && bins[0].last > bins[0].first ? `step (each column: the median of ${bins[0].last - bins[0].first + 1})` : "step";
  pen.textAlign = "left";
  pen.fillText(each, SCALE_LEFT, y + 26);
}

function lines(bin) {
  const title = bin.first === bin.last ? `step ${bin.first}` : `steps ${bin.first}–${bin.last} (medians)`;
  const parts = PHASES.toReversed().map(({ key, name }) => [name, `${milliseconds(bin[key])} ms`]);
  return [title, ["step", `${milliseconds(bin.total)} ms`], ...parts, ["efficiency", percent(efficiency(bin))]];
}

function summarise(rows) {
  if (!rows.length) return "No step has ended yet on every rank.";
  const middle = (read) => median(rows.map(read));
  const [total, exposed, hidden] = [middle((row) => row.total), middle((row) => row.exposed), middle((row) => row.hidden)];
  const floor = middle((row) => row.total - row.exposed);
  const what = rows.at(-1).whole ? "a step takes" : "forward and backward take";
  const share = hidden + exposed > 0 ? `; ${percent(hidden / (hidden + exposed))} of the communication is hidden` : "";
  return (
    `Medians of ${rows.length === 1 ? "one step" : `the last ${rows.length} steps`} (${rows[0].step}–${rows.at(-1).step}): ${what} ${milliseconds(total)} ms, ` +
    `exposed communication ${milliseconds(exposed)} ms of it. Without that (the floor): ${milliseconds(floor)} ms, efficiency ${percent(middle(efficiency))}${share}.`
  );
}
