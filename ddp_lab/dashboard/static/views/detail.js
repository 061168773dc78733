// The details of a bucket (its parameters, its times on each rank), and the table of ranks.

import { layoutWords } from "../app/kernel_facts.js";
import { clockTime } from "../app/life.js";
import { Blocks } from "../charts/blocks.js";
import { button, element, fill, makeTable, setText } from "../charts/dom.js";
import { bytes, count, milliseconds, significant } from "../charts/theme.js";
import { EDGE, EDGES, waitOf } from "../steps/lanes.js";

const PARAMETERS = ["order", "parameter", "shape", "elements", "size", "dtype", "ready at ms"];
const READY = PARAMETERS.length - 1;
const RANKS = ["rank", "ready at", "waiting for peers", "reduced at", "overlapped", "exposed", "gradient norm"];
const RANK_TABLE = ["rank", "state", "step", "last event", "events", "dropped events", "process"];

export class DetailView {
  // close(): the user closes the details; actions: {redraw(), say(text)}
  constructor(close, actions) {
    this.title = element("h4");
    this.facts = element("div", { class: "ddp-summary" });
    this.parameters = makeTable("Parameters", PARAMETERS);
    this.ranks = makeTable("Time since backward start (ms), per rank", RANKS);
    this.ranks.node.rows[0].cells[6].title =
      "L2 norm of the bucket's averaged gradients; known after “Compare gradients”";
    const closing = button("×", null, close, { class: "ddp-button ddp-close", "aria-label": "close the details" });
    this.dots = new Blocks(actions);
    this.dotsTitle = element("div", { class: "ddp-summary" });
    const scroll = (table) => element("div", { class: "ddp-table-scroll" }, table.node);
    this.node = element(
      "section",
      { class: "ddp-detail", "aria-label": "details of a bucket", hidden: true },
      closing,
      this.title,
      this.facts,
      this.dotsTitle,
      this.dots.node,
      element("div", { class: "ddp-columns" }, scroll(this.parameters), scroll(this.ranks)),
    );
  }

  // gradients: from the kernel: {step, ready: [ms], blocks} of this bucket, or undefined; compare: whether the
  // ranks can compute norms
  draw(record, bucket, info, inspection, gradients, compare) {
    this.node.hidden = bucket === null || bucket >= record.buckets;
    if (this.node.hidden) return;
    const words = info?.words ?? layoutWords();
    setText(this.title, `${words.titled(bucket)} in step ${record.step}`);
    setText(this.parameters.node.caption, words.parameters);
    setText(this.facts, [bytes(record.bytes[bucket]), ...about(info, words)].join(" · "));
    const shown = Boolean(info && gradients?.blocks.length);
    this.dots.node.hidden = this.dotsTitle.hidden = !shown;
    setText(this.dotsTitle, shown ? `When each gradient was ready, step ${gradients.step}` : "");
    this.dots.draw(shown ? gradients.blocks : []);
    fill(this.parameters.body, parameterLines(info, gradients));
    for (const row of this.parameters.node.rows) row.cells[READY].hidden = !words.gradients;
    const norms = inspection?.buckets?.[bucket]?.norms ?? {};
    this.ranks.node.rows[0].cells[6].hidden = !compare;
    fill(
      this.ranks.body,
      record.ranks.map((rank, row) => rankLine(record, bucket, rank, row, norms[rank]).slice(0, compare ? 7 : 6)),
    );
  }
}

function about(info, words) {
  if (!info) return ["its parameters are not known yet"];
  return [count(info.parameters.length, "parameter"), `${info.dtype} on ${info.device}`, words.origin];
}

function parameterLines(info, gradients) {
  return (info?.parameters ?? []).map((one, order) => [
    String(order),
    one.name,
    one.shape.length ? one.shape.join(" × ") : "scalar",
    one.numel.toLocaleString("en"),
    bytes(one.bytes),
    one.dtype,
    milliseconds(gradients?.ready[order]),
  ]);
}

function rankLine(record, bucket, rank, row, norm) {
  const index = row * record.buckets + bucket;
  const edge = (which) => record.edges[index * EDGES + which] - record.bounds[row * 3];
  return [
    String(rank),
    milliseconds(edge(EDGE.READY)),
    milliseconds(waitOf(record, row, bucket)),
    milliseconds(edge(EDGE.REDUCED)),
    milliseconds(record.hidden[index]),
    milliseconds(record.exposed[index]),
    norm === undefined ? "–" : significant(norm),
  ];
}

const GROUPED = new Intl.NumberFormat("en");

export class RankTable {
  constructor() {
    this.table = makeTable("Ranks", RANK_TABLE);
    this.node = element(
      "section",
      { class: "ddp-ranks", "aria-label": "ranks" },
      element("div", { class: "ddp-table-scroll" }, this.table.node),
    );
  }

  // past: of Life: what has ended, so that nothing grows older here; null while all is well; cluster: its name
  draw(ranks, past, cluster) {
    this.node.hidden = !ranks.length;
    setText(this.table.node.caption, cluster ? `Ranks of ${cluster}` : "Ranks");
    const hosts = new Set(ranks.map((one) => one.host));
    const state = (one) => (past?.kernel && !one.past ? "unknown" : (one.state ?? "–"));
    fill(
      this.table.body,
      ranks.map((one) => [
        String(one.rank),
        state(one),
        one.step === null || one.step === undefined || one.step < 0 ? "–" : String(one.step),
        past?.ended ? (one.lastEvent ? clockTime(one.lastEvent) : "–") : ago(one.lastEvent),
        one.recorded === null || one.recorded === undefined ? "–" : GROUPED.format(one.recorded),
        String(one.dropped ?? 0),
        [one.device, one.pid && `pid ${one.pid}`, hosts.size > 1 && one.host].filter(Boolean).join(" · ") || "–",
      ]),
    );
    [...this.table.body.rows].forEach((row, index) => {
      const kind = `ddp-state ddp-state-${state(ranks[index])}`;
      if (row.cells[1].className !== kind) row.cells[1].className = kind;
      row.cells[5].classList.toggle("ddp-warning", ranks[index].dropped > 0);
    });
  }
}

function ago(at) {
  if (at === null || at === undefined) return "–";
  const seconds = Date.now() / 1000 - at;
  if (seconds < 1) return "now";
  return seconds < 120 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}
