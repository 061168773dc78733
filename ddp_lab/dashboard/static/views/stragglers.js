// Stragglers: how long the others waited for each rank, by bucket and step; and where its own computation fell behind.

import { ChartCanvas } from "../charts/canvas.js";
import { element, fill, makeTable, section, setText, Twin } from "../charts/dom.js";
import { drawScene } from "../charts/scene.js";
import { count, milliseconds } from "../charts/theme.js";
import { judged } from "../steps/many_steps.js";

const STEPS = 100;
const PLACES = [
  "rank",
  ["where", "first place at which the rank's own computation falls behind the others'"],
  ["delay ms", "median over the steps in which it is late"],
  ["in steps", "share of the steps in which it is late"],
  ["pattern", "persistent: in most steps; data-dependent: when the rank's forward takes longer; random: in some steps"],
  ["cost", "what the steps would save without the delay"],
];

export class StragglersView {
  // actions: {choose(step), select(bucket), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.verdict = element("p", { class: "ddp-sentence", role: "status" });
    this.places = makeTable("Where a rank's own computation falls behind", PLACES);
    this.chart = new ChartCanvas("Straggler wait time (ms)", actions);
    this.twin = new Twin("Steps in which each rank was last", ["rank", "last, % of steps", "wait for it then, ms (median)", "wait for it, ms per step (longest)"]);
    this.below = element("p", { class: "ddp-sentence ddp-muted" });
    this.node = section(
      "stragglers",
      "stragglers",
      "Stragglers",
      this.verdict,
      element("div", { class: "ddp-table-scroll ddp-places" }, this.places.node),
      this.below,
      this.chart.node,
      this.twin.node,
    );
  }

  // late: from the kernel: {places: [...], steps, last: {rank: [share of the steps, ms]}}; undefined before its first answer; words: of KernelFacts
  draw(records, late, words) {
    setText(this.below, `Below: time during which every other rank had launched a ${words.unit}'s ${words.reduction} and this rank had not. A rank that falls behind stays late in the ${words.unit}s that follow.`);
    const found = waiting(records.filter((one) => one.complete && !one.abandoned).slice(-STEPS));
    const places = late?.places ?? [];
    this.places.node.parentNode.hidden = !places.length;
    fill(this.places.body, places.map((one) => [String(one.rank), one.where, milliseconds(one.delay), `${Math.round(100 * one.share)} %`, one.pattern, `${one.cost.toFixed(1)} % of the step`]));
    const text = sentence(found, late);
    setText(this.verdict, text);
    this.chart.label(`Stragglers. ${text}`);
    if (!found) return;
    const totals = found.ranks.map((_, row) => found.steps.reduce((sum, { byRank }) => sum + byRank[row], 0) / found.steps.length);
    this.twin.draw(() => found.ranks.map((rank, row) => [String(rank), ...lastOf(late, rank), milliseconds(totals[row])]));
    if (found.ranks.length > 1) drawScene(this.chart, () => this.scene(found, words));
  }

  scene(found, words) {
    const rows = found.ranks.map((rank) => `rank ${rank}`);
    const { steps } = found;
    const lines = (what, name) => (row, first, last, ms) => [`${rows[row]} · ${what} ${name(first)}${last > first ? ` – ${name(last)}` : ""}`, ["the others waited", `${milliseconds(ms)} ms`]];
    const stepName = (index) => String(steps[index].step);
    const buckets = { title: words.column, heading: `By ${words.unit} (mean of ${count(steps.length, "step")})`, columns: found.buckets, value: (row, bucket) => found.cells[row][bucket], name: words.cell, unit: "ms per step", act: (_, bucket) => this.actions.select(bucket) };
    const over = { title: "step", heading: `By step (${words.unit} with the longest wait)`, columns: steps.length, value: (row, index) => steps[index].byRank[row], name: stepName, unit: "ms", act: (_, index) => this.actions.choose(steps[index].step) };
    return { height: 220, grids: [buckets, over].map((one) => ({ ...one, rows, axis: one.title, lines: lines(one.title, one.name) })) };
  }
}

// The analysed steps in which a rank was last, in percent, and how long the others then waited: those of the sentence.
function lastOf(late, rank) {
  const [share, ms] = late?.last?.[rank] ?? [NaN, NaN];
  return [Number.isNaN(share) ? "–" : (100 * share).toFixed(0), ms === null || Number.isNaN(ms) ? "–" : milliseconds(ms)];
}

function sentence(found, late) {
  if (!found) return "No step is complete on every rank yet.";
  if (found.ranks.length < 2) return "A single rank has no stragglers.";
  if (!late) return "Waiting for the analysis.";
  return late.text;
}

// For steps with the same ranks and buckets: `cells[row][bucket]`: mean ms per step; `steps[index].byRank[row]`: ms in the
// bucket with the longest wait (the waits of a step's buckets overlap, so they can't be added).
function waiting(records) {
  const alike = judged(records).filter((one, _, all) => one.rankCount === all.at(-1).rankCount && one.buckets === all.at(-1).buckets);
  const newest = alike.at(-1);
  if (!newest) return null;
  const cells = newest.ranks.map(() => new Float64Array(newest.buckets));
  const steps = alike.map((record) => {
    const byRank = new Float64Array(newest.rankCount);
    record.alone.forEach((ms, bucket) => {
      const row = record.ranks.indexOf(record.lastRank[bucket]);
      if (row < 0 || Number.isNaN(ms)) return;
      cells[row][bucket] += ms / alike.length;
      byRank[row] = Math.max(byRank[row], ms);
    });
    return { step: record.step, byRank };
  });
  return { ranks: newest.ranks, buckets: newest.buckets, cells, steps };
}
