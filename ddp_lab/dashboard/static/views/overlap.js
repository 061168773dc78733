// Overlap: the time breakdown of each step as columns, and its efficiency.

import { PHASES } from "../generated.js";
import { ChartCanvas, median } from "../charts/canvas.js";
import { element, fill, makeTable, phaseLegend, scrolled, section, setText, Twin } from "../charts/dom.js";
import { drawScene, robustTop, SIDES } from "../charts/scene.js";
import { milliseconds } from "../charts/theme.js";
import { binned, judged } from "../steps/many_steps.js";

const SUMMARY_STEPS = 100;
const percent = (value) => (Number.isNaN(value) ? "–" : `${(100 * value).toFixed(0)} %`);

export class OverlapView {
  // actions: {choose(step), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.summary = element("div", { class: "ddp-summary", role: "status" });
    this.chart = new ChartCanvas("Step time breakdown (ms)", actions);
    this.twin = new Twin("Time breakdown of the newest steps (ms, means over the ranks)", ["step", "ms", ...PHASES.map((one) => one.name), "efficiency"]);
    const keys = phaseLegend("from bottom to top of a column");
    this.named = element("p", { class: "ddp-sentence", role: "status" });
    this.parts = element("div", { class: "ddp-parts" });
    this.node = section("overlap", "overlap of computation and communication", "Overlap", this.summary, keys, this.chart.node, this.twin.node, this.named, this.parts);
  }

  // records: those of the model, in order; parts: of a step, from the kernel: {text, head, rows}, undefined at first
  draw(records, shown, parts) {
    this.drawParts(parts?.rows?.length ? parts : null);
    const rows = records.filter((one) => !Number.isNaN(one.phases[0])).map(rowOf);
    const text = summarise(judged(rows).slice(-SUMMARY_STEPS));
    setText(this.summary, text);
    this.chart.label(`Overlap. ${text}`);
    this.twin.draw(() => rows.slice(-100).reverse().map((row) => [
      String(row.step), milliseconds(row.total), ...PHASES.map(({ key }) => milliseconds(row[key])), percent(efficiency(row)),
    ]));
    if (rows.length) drawScene(this.chart, () => this.scene(rows, shown));
  }

  drawParts(parts) {
    setText(this.named, parts ? parts.text : "");
    const text = JSON.stringify(parts);
    if (text === this.told) return;
    this.told = text;
    if (!parts) return this.parts.replaceChildren();
    const table = makeTable("Parts of a step (ms, means)", parts.head);
    fill(table.body, parts.rows.map(([name, ms, share, ...rest]) => [name.trim(), milliseconds(ms), share.toFixed(1), ...rest.map((one) => (typeof one === "number" ? milliseconds(one) : one))]));
    parts.rows.forEach(([name], index) => table.body.rows[index].classList.toggle("ddp-line", name.startsWith(" ")));
    this.parts.replaceChildren(scrolled("Parts of a step", table.node));
  }

  scene(rows, shown) {
    const bins = binned(rows, (this.chart.node.clientWidth - SIDES) / 4, ["total", ...PHASES.map((one) => one.key)]);
    const joined = bins[0].last - bins[0].first + 1;
    return {
      label: joined > 1 ? `step (each column: median of ${joined})` : "step",
      steps: bins.map((bin) => ({ key: `step ${bin.first}`, name: String(bin.first), chosen: bin.first <= shown && shown <= bin.last, lines: () => lines(bin), act: () => this.actions.choose(bin.last) })),
      panels: [
        { label: "ms per step", height: 210, top: robustTop(bins.map((one) => one.total)), marks: PHASES.map(({ key }) => ({ bars: bins.map((bin) => bin[key]), role: key })) },
        { label: "efficiency", height: 64, top: 1, text: percent, marks: [{ line: bins.map(efficiency), role: "ink" }] },
      ],
    };
  }
}

// A complete step: ms of each phase by its key, and their sum.
function rowOf({ step, generation, whole, phases }) {
  const parts = PHASES.map(({ key }, index) => [key, phases[index]]);
  return { step, generation, whole, total: phases.reduce((sum, ms) => sum + ms, 0), ...Object.fromEntries(parts) };
}

// Share of the step that is not exposed communication: 1 is the no-communication baseline.
function efficiency(one) {
  return one.total > 0 ? (one.total - one.exposed) / one.total : NaN;
}

function lines(bin) {
  const title = bin.first === bin.last ? `step ${bin.first}` : `steps ${bin.first}–${bin.last} (medians)`;
  const parts = PHASES.toReversed().map(({ key, name }) => [name, `${milliseconds(bin[key])} ms`]);
  return [title, ["step", `${milliseconds(bin.total)} ms`], ...parts, ["efficiency", percent(efficiency(bin))]];
}

function summarise(rows) {
  if (!rows.length) return "No step is complete on every rank yet.";
  const middle = (read) => median(rows.map(read));
  const [total, exposed, hidden] = [middle((row) => row.total), middle((row) => row.exposed), middle((row) => row.hidden)];
  const floor = middle((row) => row.total - row.exposed);
  const what = rows.at(-1).whole ? "a step takes" : "forward and backward take";
  const share = hidden + exposed > 0 ? `; ${percent(hidden / (hidden + exposed))} of the communication is overlapped` : "";
  return (
    `Medians of ${rows.length === 1 ? "one step" : `the last ${rows.length} steps`} (${rows[0].step}–${rows.at(-1).step}): ${what} ${milliseconds(total)} ms, ` +
    `of which ${milliseconds(exposed)} ms are exposed communication. No-communication baseline: ${milliseconds(floor)} ms, efficiency ${percent(middle(efficiency))}${share}.`
  );
}
