// Gradient sync: one table row per bucket of the displayed step.

import { layoutWords } from "../app/kernel_facts.js";
import { asking } from "../app/life.js";
import { ChartCanvas } from "../charts/canvas.js";
import { button, element, makeTable, rowsInView, scrolled, section, setRows, setText, Twin } from "../charts/dom.js";
import { drawScene } from "../charts/scene.js";
import { bytes, count, ending, milliseconds, significant } from "../charts/theme.js";
import { PARTS } from "../generated.js";
import { waitOf } from "../steps/lanes.js";

// rates: the unit of the bandwidths
const columns = ({ unit, column, reduction, label, size, parts }, rates = "GB/s") => [
  [column, `${label}; click for its parameters`],
  ["size", size],
  [`${reduction} ms`, `from the last rank's launch until the ${unit} is reduced on every rank`],
  [rates, `algorithm bandwidth: the ${unit}'s bytes divided by the time of its ${reduction} (1 GB = 1e9 bytes)`],
  [`bus ${rates}`, "bus bandwidth: algorithm bandwidth × 2 (n − 1) / n for n ranks; the rate over each link of a ring"],
  [
    "of the limit",
    "time that the measured link needs for an all-reduce of this size alone, divided by the time of this one",
  ],
  ["longest wait ms", "how long the first rank waited for its peers, and for which rank"],
  ["overlapped | exposed ms", `launched → reduced, mean over ranks: ${parts}`],
];

const [BUS, LINK] = [4, 5]; // the columns "bus GB/s" and "of the limit": of all-reduces

export class SyncView {
  // actions: {select(bucket), compare(), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.table = makeTable("", columns(layoutWords()));
    this.table.node.classList.add("ddp-sync-table");
    this.summary = element("div", { class: "ddp-summary" });
    this.button = button(
      "Compare gradients",
      "Check on every rank whether its averaged gradients equal those of the other ranks",
      () => this.actions.compare(),
    );
    this.verdict = element("span", { class: "ddp-verdict", role: "status" });
    this.comparison = element("div", { class: "ddp-compare" }, asking("ranks", this.button), this.verdict);
    this.limit = element("div", { class: "ddp-summary ddp-limit" });
    this.waits = new ChartCanvas("Waiting for peers, by rank (ms)", actions);
    this.twin = new Twin("Waiting for peers (ms)", ["rank", "by bucket", "sum"]);
    this.details = element(
      "details",
      { class: "ddp-twin ddp-waits", toggle: () => this.openWaits() },
      element("summary", { tabindex: "0" }, "Waiting for peers, by rank"),
      element("div"),
    );
    const table = scrolled("gradient sync table", this.table.node);
    this.inView = null; // the rows that can be seen: asking the page makes it lay itself out at once
    new ResizeObserver(() => (this.inView = null)).observe(table);
    table.addEventListener("scroll", () => {
      this.inView = null;
      this.actions.redraw();
    });
    this.node = section(
      "sync",
      "gradient synchronisation",
      "Gradient sync",
      this.summary,
      table,
      this.limit,
      this.comparison,
      this.details,
    );
  }

  openWaits() {
    this.details.lastChild.replaceChildren(...(this.details.open ? [this.waits.node, this.twin.node] : []));
    this.actions.redraw();
  }

  // link: from the kernel: {ns: expected ns by bucket, limit: bus GB/s, from: in words} or undefined; means: what the
  // ranks can do (dashboard.py); words: of KernelFacts; quick: only the rows in view
  draw(record, selected, { inspection, link, means, words, quick }) {
    this.record = record;
    this.words = words;
    this.comparison.hidden = !means.compare || !words.compares;
    const shown = { [BUS]: words.bus, [LINK]: words.bus && means.link };
    const [rates, factor] = unitOf(record.bus);
    this.drawHead(shown, rates);
    const longest = Math.max(
      ...record.meanHidden.map((hidden, bucket) => hidden + record.meanExposed[bucket] || 0),
      1e-9,
    );
    setRows(this.table.body, record.buckets, (bucket) => this.makeRow(bucket));
    if (quick) this.inView ??= rowsInView(this.table.body);
    const [first, last] = quick ? this.inView : [0, record.buckets];
    [...this.table.body.rows].forEach((line, bucket) => {
      if (bucket < first || bucket > last) return;
      this.drawRow(line.cells, bucket, { link, shown, factor, longest });
      const equal = inspection?.buckets?.[bucket]?.equal;
      setText(line.cells[0].lastChild, { true: "=", false: "≠" }[equal] ?? "");
      line.classList.toggle("ddp-selected", bucket === selected);
      line.classList.toggle("ddp-differs", equal === false);
    });
    setText(this.summary, summarise(record, words));
    this.drawVerdict(inspection);
    const limit = shown[LINK] ? limitText(record, link) : "";
    setText(this.limit, limit);
    this.limit.hidden = !limit;
    if (this.details.open) this.drawWaits(record);
  }

  drawRow(cells, bucket, { link, shown, factor, longest }) {
    const { record, words } = this;
    setText(cells[0].firstChild, ending(words.cell(bucket)));
    if (words.named) cells[0].title = words.name(bucket);
    setText(cells[1], bytes(record.bytes[bucket]));
    setText(cells[2], milliseconds(record.allReduce[bucket]));
    setText(cells[3], significant(record.bandwidth[bucket] * factor));
    setText(cells[BUS], significant(record.bus[bucket] * factor));
    for (const column of [BUS, LINK]) cells[column].hidden = !shown[column];
    const share = link?.ns?.[bucket] / (record.allReduce[bucket] * 1e6);
    setText(cells[LINK], share > 0 ? `${Math.round(100 * share)} %` : "–");
    const wait = record.late[bucket];
    setText(cells[6], wait > 0 ? `${milliseconds(wait)} for rank ${record.lastRank[bucket]}` : "–");
    this.fillBar(cells[7], record.meanHidden[bucket], record.meanExposed[bucket], longest);
  }

  drawHead(shown, rates) {
    columns(this.words, rates).forEach(([name, title], column) => {
      const cell = this.table.cells[column];
      setText(cell, name);
      if (cell.title !== title) cell.title = title;
    });
    this.table.node.classList.toggle("ddp-of-modules", this.words.named);
    for (const column of [BUS, LINK]) this.table.cells[column].hidden = !shown[column];
  }

  drawWaits(record) {
    const { words } = this;
    const names = record.ranks.map((rank) => `rank ${rank}`);
    const buckets = [...Array(record.buckets).keys()];
    const values = names.map((_, row) => buckets.map((bucket) => waitOf(record, row, bucket) || 0));
    const panel = {
      x: { label: words.column, lanes: buckets.map(words.cell), chooses: "bucket" },
      y: { lanes: names },
      marks: [{ kind: "cells", name: "waiting for peers", unit: "ms", values, others: [] }],
    };
    setText(this.twin.table.cells[1], `by ${words.column}`);
    drawScene(this.waits, { panels: [panel] }, { actions: this.actions, shown: null, all: false });
    this.twin.draw(() =>
      names.map((name, row) => [
        name,
        values[row].map(milliseconds).join("  "),
        milliseconds(values[row].reduce((sum, one) => sum + one, 0)),
      ]),
    );
  }

  // The tooltip: how long each rank waited.
  waitsOf(bucket) {
    const lines = this.record.ranks.map(
      (rank, row) => `rank ${rank}: ${milliseconds(waitOf(this.record, row, bucket))} ms`,
    );
    return `waiting for peers\n${lines.slice(0, 16).join("\n")}${lines.length > 16 ? "\n…" : ""}`;
  }

  makeRow(bucket) {
    const number = element(
      "button",
      { type: "button", class: "ddp-link", title: "show its parameters" },
      String(bucket),
    );
    const mark = element("span", { class: "ddp-mark", title: "=: gradients are equal on all ranks; ≠: they differ" });
    const row = element(
      "tr",
      { click: () => this.actions.select(bucket) },
      element("th", { scope: "row" }, number, mark),
    );
    for (let column = 1; column < this.table.cells.length; column++) row.append(element("td"));
    const part = (index) => element("i", { class: `ddp-bar ddp-bar-${PARTS[index].name}` });
    row.cells[7].append(
      element("span", { class: "ddp-bars" }, part(3), part(4)),
      element("span", { class: "ddp-figures" }),
    );
    row.cells[6].addEventListener("pointerenter", (event) => (event.target.title = this.waitsOf(bucket)));
    return row;
  }

  fillBar(cell, hidden, exposed, longest) {
    [hidden, exposed].forEach(
      (ms, index) => (cell.firstChild.children[index].style.width = `${((ms || 0) / longest) * 100}%`),
    );
    setText(cell.lastChild, `${milliseconds(hidden)} | ${milliseconds(exposed)}`);
  }

  drawVerdict(inspection) {
    const state = inspection?.state;
    this.button.disabled = state === "asked";
    this.verdict.className = `ddp-verdict ddp-${state ?? "none"}`;
    setText(this.verdict, inspection?.text ?? "");
  }
}

/** @type {[string, number, number][]} Units of a bandwidth: how many are 1 GB/s, from how many GB/s on. */
const RATES = [
  ["GB/s", 1, 0.01],
  ["MB/s", 1e3, 1e-3],
  ["kB/s", 1e6, 1e-6],
  ["B/s", 1e9, 0],
];

// The unit in which the largest of these bandwidths (GB/s) has few digits, and what they are multiplied by.
function unitOf(bandwidths) {
  const largest = Math.max(...bandwidths.filter((one) => one > 0));
  return RATES.find(([, , least]) => largest >= least) ?? RATES[0];
}

function limitText(record, link) {
  if (record.rankCount < 2) return "";
  if (!link?.ns)
    return "Limit of the link: not measured. Measure it with lab.measure_communication(), which takes about a second.";
  return `Limit of the link: ${significant(link.limit)} GB/s bus bandwidth for large buffers (${link.from}).`;
}

// One sentence about the step: the share of overlapped communication, and the longest wait.
function summarise(record, words) {
  const parts = [];
  if (record.hiddenShare !== null)
    parts.push(`${Math.round(record.hiddenShare * 100)} % of the communication overlapped with the backward`);
  const wait = record.late.reduce((best, ms, bucket) => (ms > (record.late[best] ?? 0) ? bucket : best), -1);
  if (wait >= 0)
    parts.push(
      `longest wait ${milliseconds(record.late[wait])} ms for rank ${record.lastRank[wait]} in ${words.name(wait)}`,
    );
  return parts.length
    ? `Step ${record.step}: ${parts.join("; ")}.`
    : `Step ${record.step}: ${count(record.buckets, words.unit)}.`;
}
