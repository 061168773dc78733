// Gradient monitoring: norms before and after averaging, by rank and bucket; noise scale; origin of NaN; drift of
// replicas.

import { Asker, NeedsCluster, StatusLine } from "../app/control_status.js";
import { ChartCanvas } from "../charts/canvas.js";
import {
  button,
  element,
  field,
  fill,
  legend,
  makeTable,
  number,
  read,
  scrolled,
  section,
  setText,
  Twin,
} from "../charts/dom.js";
import { drawScene } from "../charts/scene.js";
import { bytes, count, milliseconds, significant } from "../charts/theme.js";
import { COLOURS, RANK_COLOURS } from "../generated.js";

const COST =
  "Monitoring has a cost: a monitored step reads each bucket twice more (0.13 ms per MiB on one CPU core) " +
  "and gathers some numbers; a comparison reads all parameters once (0.3 ms per MiB).";
const NONE =
  "No step has been monitored. Start monitoring above, or call model.watch_gradients(every=10) in the training code.";
const NONE_HERE = "No step has been monitored. Call model.watch_gradients(every=10) in the training code.";
const MOST_LINES = 8;
const WIDE_RANGE = 50; // largest over smallest norm from which the scale is logarithmic
const DASHES = [[], [5, 2], [2, 2], [7, 2, 2, 2]];

export class GradientsView {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.asker = new Asker("watch", actions);
    this.status = new StatusLine();
    this.buildControls();
    this.summary = element("p", { class: "ddp-sentence", role: "status" });
    this.notice = element("div", { class: "ddp-notice", role: "alert", hidden: true });
    this.legend = element("div");
    this.chart = new ChartCanvas(
      "Norms of the gradients before and after averaging, over the monitored steps",
      actions,
    );
    this.heading = element("div", { class: "ddp-summary" });
    this.waits = new ChartCanvas("Difference of each rank's norm from the mean of the ranks, by bucket (%)", actions);
    this.twin = new Twin("Monitored steps, newest first", [
      "step",
      "before: smallest",
      "mean",
      "largest",
      "average",
      "noise scale",
      "not finite",
      "cost, ms",
    ]);
    this.checks = makeTable("Comparisons of the replicas, newest first", [
      "before step",
      "result",
      "ranks with equal values",
      "cost, ms",
    ]);
    this.drift = scrolled("comparisons of the replicas", this.checks.node, "ddp-checks");
    this.pictures = element("div", {}, this.legend, this.chart.node, this.heading, this.waits.node, this.twin.node);
    this.node = section(
      "gradients",
      "gradients",
      "Gradients",
      this.needs.node,
      this.notice,
      this.summary,
      this.pictures,
      this.drift,
    );
  }

  buildControls() {
    this.every = number("monitor gradients every N steps", "10", { min: "1", step: "1" });
    this.apart = number("compare replicas every N steps", "100", { min: "1", step: "1" });
    const ask = (command) => this.asker.ask({ ...command, reducer: this.reducer });
    this.watch = button("Monitor", "starting within the next steps", () =>
      ask({ do: "gradients", every: read(this.every) ?? 0 }),
    );
    this.unwatch = button("Stop", "stop monitoring", () => ask({ do: "gradients", every: 0 }));
    this.compare = button("Compare", "starting within the next steps", () =>
      ask({ do: "drift", every: read(this.apart) ?? 0 }),
    );
    this.uncompare = button("Stop", "stop comparing", () => ask({ do: "drift", every: 0 }));
    this.now = button("Check now", "between two steps while a cell trains, otherwise immediately", () =>
      ask({ do: "check" }),
    );
    this.row = element(
      "div",
      { class: "ddp-toolbar ddp-form" },
      element("span", { class: "ddp-field" }, field("gradients every", this.every, " steps"), this.watch, this.unwatch),
      element(
        "span",
        { class: "ddp-field" },
        field("replicas every", this.apart, " steps"),
        this.compare,
        this.uncompare,
        this.now,
      ),
    );
    const cost = element("p", { class: "ddp-sentence ddp-muted" }, COST);
    this.needs = new NeedsCluster(this.row, this.status.node, cost);
  }

  // known: from the kernel (gradients.py), undefined before its first answer; watching: of its controls; step: the
  // chosen one
  draw(reducer, control, watching, known, step) {
    this.reducer = reducer;
    const live = this.needs.draw(control);
    for (const one of this.row.querySelectorAll("button")) one.disabled = reducer === null;
    this.unwatch.disabled ||= !watching?.gradients;
    this.uncompare.disabled ||= !watching?.drift;
    const state = live ? current(watching) : "";
    const withState = (text) => text && [text, state].filter(Boolean).join(" ");
    this.status.draw(this.asker.state(control), withState(watching?.said) || state, withState(watching?.error));
    const [steps, drift] = [known?.steps ?? [], known?.drift ?? []];
    this.pictures.hidden = !steps.length;
    setText(
      this.summary,
      reducer === null
        ? "No model yet. Wrap one in ddp_lab.DistributedDataParallel."
        : steps.length
          ? known.text
          : live
            ? NONE
            : NONE_HERE,
    );
    this.notice.hidden = !known?.notice;
    setText(this.notice, known?.notice ?? "");
    this.drawChecks(drift);
    if (steps.length) this.drawPictures(known, step);
  }

  drawPictures(known, step) {
    const { steps, ranks, buckets } = known;
    const shown = (steps.findLast((one) => one.step <= step) ?? steps.at(-1)).step;
    this.drawLegend(ranks);
    this.chart.label(`Gradients. ${this.summary.textContent}`);
    drawScene(this.chart, () => this.scene(known, shown));
    this.twin.draw(() => steps.toReversed().slice(0, 100).map(row));
    const found = buckets[shown];
    setText(
      this.heading,
      found
        ? `Step ${shown}, by bucket: difference of each rank's norm from the mean of the ranks, in percent. ` +
            `${found.spread}`
        : `Step ${shown}: its buckets are no longer stored here; see Timeline.gradients().`,
    );
    this.waits.node.hidden = !found;
    if (found) this.drawBuckets(found, ranks);
  }

  // Norms over the monitored steps, by rank and averaged; below them the noise scale.
  scene({ steps, ranks, noise_top: noiseTop }, shown) {
    const finite = (one) => one.before.filter((value) => value !== null);
    const norms = steps.flatMap((one) => [...one.before, one.after]).filter((value) => value > 0);
    const [low, high] = [Math.min(...norms), Math.max(...norms)];
    const power = (value, round) => 10 ** round(Math.log10(value));
    const wide = norms.length > 0 && high / low >= WIDE_RANGE;
    const scale = wide
      ? { label: "L2 norm (log)", low: power(low, Math.floor), top: power(high, Math.ceil) }
      : { label: "L2 norm", top: norms.length ? 1.05 * high : 1 };
    const own =
      ranks.length > MOST_LINES
        ? []
        : ranks.map((_, row) => ({
            line: steps.map((one) => one.before[row]),
            role: `rank${row}`,
            width: 1.25,
            dash: DASHES[row % DASHES.length],
          }));
    const ends = [Math.min, Math.max].map((end) =>
      steps.map((one) => (finite(one).length ? end(...finite(one)) : null)),
    );
    const bad = steps.flatMap((one, index) => (one.bad ? [{ rule: index, role: "bad", text: one.bad.kind }] : []));
    const noise = steps.map((one) => one.noise);
    return {
      head: 26, // for values that were not finite
      label:
        `step (${count(steps.length, "monitored step")}); ` +
        "noise scale in batches of a rank, over 20 monitored steps",
      steps: steps.map((one) => ({
        key: `monitored ${one.step}`,
        name: String(one.step),
        chosen: one.step === shown,
        lines: () => stepLines(one, ranks),
        act: () => this.actions.choose(one.step),
      })),
      panels: [
        {
          ...scale,
          height: 150,
          marks: [{ band: ends }, ...own, { line: steps.map((one) => one.after), role: "ink", width: 2.25 }, ...bad],
        },
        { label: "noise", height: 56, top: noiseTop, marks: [{ line: noise, role: "noise", width: 1.75 }] },
      ],
    };
  }

  drawBuckets(found, ranks) {
    const names = ranks.map((rank) => `rank ${rank}`);
    const value = (rowOf, bucket) => found.off[rowOf][bucket];
    const lines = (rowOf, bucket) => [
      `${names[rowOf]} · bucket ${bucket}`,
      ["norm before averaging", show(found.before[rowOf][bucket])],
      ["ranks' mean", show(found.mean[bucket])],
      ["norm of the average", show(found.after[bucket])],
    ];
    drawScene(this.waits, () => ({
      height: 160,
      grids: [
        {
          title: "norm",
          rows: names,
          columns: found.after.length,
          value,
          name: String,
          axis: "bucket",
          unit: "% from the mean",
          lines,
        },
      ],
    }));
  }

  drawLegend(ranks) {
    const text = JSON.stringify(ranks);
    if (text === this.legendText) return;
    this.legendText = text;
    const line = (colour) => `height: 3px; background: ${colour}`;
    const own =
      ranks.length > MOST_LINES
        ? []
        : ranks.map((rank, index) => [`rank ${rank}`, line(RANK_COLOURS[index]), "norm of its own gradients"]);
    this.legend.replaceChildren(
      legend("legend", [
        ...own,
        ["smallest to largest rank", "background: var(--ddp-band); opacity: 0.5", "norms before averaging"],
        ["average", line("var(--ddp-ink)"), "norm after averaging"],
        [
          "noise scale",
          line(COLOURS.noise),
          "[McCandlish et al. 2018]: the batch size, in batches of a rank, up to which a larger batch still pays off",
        ],
      ]),
    );
  }

  drawChecks(checks) {
    this.drift.hidden = !checks.length;
    const holders = (groups) => groups.map((ranks) => ranks.join(", ")).join(" | ");
    fill(
      this.checks.body,
      checks
        .toReversed()
        .map((one) => [
          String(one.step),
          one.error ||
            (one.ok
              ? `equal (${bytes(one.bytes)})`
              : `differ: ${one.first}${one.differing > 1 ? ` and ${one.differing - 1} more` : ""}`),
          one.ok ? "all" : holders(one.groups),
          milliseconds(one.ms),
        ]),
    );
    checks.toReversed().forEach((one, index) => this.checks.body.rows[index].classList.toggle("ddp-differs", !one.ok));
  }
}

function stepLines(one, ranks) {
  const bad = one.bad
    ? [
        [
          one.bad.kind,
          one.bad.parameter ? `first in ${one.bad.parameter}, rank ${one.bad.rank}` : "only in the average",
        ],
      ]
    : [];
  const shown = ranks.slice(0, MOST_LINES).map((rank, index) => [`rank ${rank}, before`, show(one.before[index])]);
  return [
    `step ${one.step}`,
    ...bad,
    ...shown,
    ["average", show(one.after)],
    ["noise scale", show(one.noise)],
    ["monitoring cost", `${one.ms.toFixed(2)} ms`],
  ];
}

function show(value) {
  return value === null ? "–" : significant(value);
}

function row(one) {
  const known = one.before.filter((value) => value !== null);
  const bad = one.bad
    ? `${one.bad.kind}: ${one.bad.parameter ? `${one.bad.parameter}, rank ${one.bad.rank}` : "average"}`
    : "";
  const numbers = known.length ? [Math.min(...known), one.mean, Math.max(...known)] : [null, null, null];
  return [String(one.step), ...numbers.map(show), show(one.after), show(one.noise), bad, one.ms.toFixed(2)];
}

function current(watching) {
  if (!watching) return "";
  const parts = [];
  if (watching.gradients) parts.push(`Gradients of every ${ordinal(watching.gradients)} step are monitored.`);
  if (watching.drift) parts.push(`Replicas are compared before every ${ordinal(watching.drift)} step.`);
  if (watching.pending) parts.push("A request takes effect within the next steps.");
  return parts.join(" ");
}

function ordinal(value) {
  if (value === 1) return "single";
  const last = value % 100 > 10 && value % 100 < 14 ? 0 : value % 10;
  return `${value}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}
