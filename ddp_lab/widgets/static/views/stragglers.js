// Stragglers: for which rank the others waited, in which bucket, how often; and where its own computation fell behind.

import { ChartCanvas, median } from "../charts/canvas.js";
import { paintHeat } from "../charts/heat.js";
import { judged } from "../steps/many_steps.js";
import { Twin, fill, makeTable } from "../charts/tables.js";
import { element, milliseconds, setText } from "../charts/theme.js";

const STEPS = 100;
const PLACES = [
  "rank",
  ["where", "the first place at which its own computation falls behind the others'"],
  ["by ms", "median over the steps in which it does"],
  ["in steps", "share of the steps in which it does"],
  ["class", "persistent: in most steps; data-dependent: with the rank's forward; random: in some steps"],
  ["costs", "what the steps would have saved without it"],
];

export class StragglersView {
  // actions: {choose(step), select(bucket), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.verdict = element("p", { class: "ddp-sentence", role: "status" });
    this.places = makeTable("Where a rank's own computation falls behind", PLACES);
    this.chart = new ChartCanvas("Milliseconds that all other ranks waited for one alone, by bucket and by step", actions);
    this.twin = new Twin("Each rank as the last one", ["rank", "last in %", "then late by ms (median)", "waited for, ms a step (longest bucket)"]);
    this.node = element(
      "section",
      { class: "ddp-stragglers", "aria-label": "stragglers" },
      element("h4", {}, "Stragglers"),
      this.verdict,
      element("div", { class: "ddp-table-scroll ddp-places" }, this.places.node),
      element("p", { class: "ddp-sentence ddp-muted" }, "Below: how long every other rank had launched a bucket's collective and this rank had not. Whoever is late once stays late in the buckets that follow."),
      this.chart.node,
      this.twin.node,
    );
  }

  // late: of the kernel: {places: [...], steps} or undefined while it has not looked
  draw(records, late) {
    const found = waiting(records.filter((one) => one.complete && !one.abandoned).slice(-STEPS));
    const places = late?.places ?? [];
    this.places.node.parentNode.hidden = !places.length;
    fill(this.places.body, places.map((one) => [String(one.rank), one.where, milliseconds(one.delay), `${Math.round(100 * one.share)} %`, one.pattern, `${one.cost.toFixed(1)} % of the step`]));
    const text = sentence(found, late);
    setText(this.verdict, text);
    this.chart.label(`Stragglers. ${text}`);
    if (!found) return;
    const totals = found.ranks.map((_, row) => found.steps.reduce((sum, { byRank }) => sum + byRank[row], 0) / found.steps.length);
    this.twin.draw(() => found.ranks.map((rank, row) => [String(rank), (100 * found.share[row]).toFixed(0), milliseconds(found.late[row]), milliseconds(totals[row])]));
    if (found.ranks.length < 2) return;
    const rowHeight = Math.min(Math.max(Math.floor(220 / found.ranks.length), 5), 22);
    const block = found.ranks.length * rowHeight + 52;
    const drawing = this.chart.begin(2 * block + 8);
    if (drawing) this.chart.finish(this.paint(drawing, found, rowHeight, block));
  }

  paint(drawing, found, rowHeight, block) {
    const names = found.ranks.map((rank) => `rank ${rank}`);
    const wait = (value) => ["waited for alone", `${milliseconds(value)} ms`];
    const heading = (text, y) => {
      drawing.pen.font = `600 11.5px ${drawing.theme.font}`;
      drawing.pen.textAlign = "left";
      drawing.pen.fillStyle = drawing.theme.ink;
      drawing.pen.fillText(text, 4, y);
    };
    const steps = found.steps.length;
    heading(`By bucket (mean of ${steps} ${steps === 1 ? "step" : "steps"})`, 8);
    const buckets = { title: "bucket", rowNames: names, columns: found.buckets, value: (row, bucket) => found.cells[row][bucket], columnName: String, axis: "bucket", unit: "ms a step" };
    const first = paintHeat(drawing, 18, rowHeight, buckets, (row, bucket, last, value) => [`${names[row]} · bucket ${bucket}${last > bucket ? `–${last}` : ""}`, wait(value)], (_, bucket) => this.actions.select(bucket));
    heading("By step (the bucket in which they waited longest)", block + 10);
    const over = { title: "step", rowNames: names, columns: steps, value: (row, index) => found.steps[index].byRank[row], columnName: (index) => String(found.steps[index].step), axis: "step", unit: "ms" };
    const label = (index, last) => `step ${found.steps[index].step}${last > index ? `–${found.steps[last].step}` : ""}`;
    const second = paintHeat(drawing, block + 20, rowHeight, over, (row, index, last, value) => [`${names[row]} · ${label(index, last)}`, wait(value)], (_, index) => this.actions.choose(found.steps[index].step));
    return [...first, ...second];
  }
}

function sentence(found, late) {
  if (!found) return "No step has ended yet on every rank.";
  if (found.ranks.length < 2) return "With one rank there is nobody to wait for.";
  if (!late) return "The kernel has not looked for late places yet.";
  return late.text;
}

// Of steps with the same ranks and buckets: `cells[row][bucket]` mean ms a step, `share[row]` of the collectives in which the
// rank was last, `late[row]` median ms in those, `steps[index].byRank[row]` ms in the bucket that took longest (the waits of a
// step's buckets lie over each other: their sum is no time).
function waiting(records) {
  const alike = judged(records).filter((one, _, all) => one.rankCount === all.at(-1).rankCount && one.buckets === all.at(-1).buckets);
  const newest = alike.at(-1);
  if (!newest) return null;
  const cells = newest.ranks.map(() => new Float64Array(newest.buckets));
  const when = newest.ranks.map(() => []);
  const steps = alike.map((record) => {
    const byRank = new Float64Array(newest.rankCount);
    record.alone.forEach((ms, bucket) => {
      const row = record.ranks.indexOf(record.lastRank[bucket]);
      if (row < 0 || Number.isNaN(ms)) return;
      when[row].push(ms);
      cells[row][bucket] += ms / alike.length;
      byRank[row] = Math.max(byRank[row], ms);
    });
    return { step: record.step, byRank };
  });
  const collectives = when.reduce((sum, one) => sum + one.length, 0);
  return { ranks: newest.ranks, buckets: newest.buckets, cells, steps, share: when.map((one) => one.length / Math.max(collectives, 1)), late: when.map(median) };
}
