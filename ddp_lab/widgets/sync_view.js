// Gradient sync: one table row per bucket of the step that is shown.

import { PARTS, bytes, element, milliseconds, setRows, setText, significant } from "./theme.js";
import { count } from "./timeline_view.js";

const COLUMNS = [
  ["bucket", "number of the bucket; click for its parameters"],
  ["size", "bytes of the bucket's buffer"],
  ["all-reduce ms", "from the last rank's launch until the bucket is reduced on every rank"],
  ["GB/s", "the bucket's bytes (1e9 a second) over its all-reduce"],
  ["longest wait ms", "how long the rank that launched first waited, and for which rank"],
  ["hidden | exposed ms", "launched → reduced, mean over ranks: behind the backward's computation | after it"],
];

export class SyncView {
  // actions: {select(bucket), compare()}
  constructor(actions) {
    this.actions = actions;
    this.body = element("tbody");
    const heads = COLUMNS.map(([name, title]) => element("th", { scope: "col", title }, name));
    this.table = element("table", { class: "ddp-sync-table" }, element("thead", {}, element("tr", {}, ...heads)), this.body);
    this.summary = element("div", { class: "ddp-summary" });
    this.button = element("button", { type: "button", class: "ddp-button" }, "Compare gradients");
    this.button.title = "Compute on every rank whether its averaged gradients equal those of the other ranks";
    this.button.addEventListener("click", () => this.actions.compare());
    this.verdict = element("span", { class: "ddp-verdict", role: "status" });
    this.node = element(
      "section",
      { class: "ddp-sync", "aria-label": "gradient synchronisation by bucket" },
      element("h4", {}, "Gradient sync"),
      this.summary,
      element("div", { class: "ddp-table-scroll", tabindex: "0", role: "region", "aria-label": "gradient sync table" }, this.table),
      element("div", { class: "ddp-compare" }, this.button, this.verdict),
    );
  }

  draw(record, selected, inspection) {
    this.record = record;
    const rows = measure(record);
    const longest = Math.max(...rows.map((row) => row.hidden + row.exposed || 0), 1e-9);
    setRows(this.body, record.buckets, (bucket) => this.makeRow(bucket));
    const same = inspection?.buckets ?? {};
    rows.forEach((row, bucket) => {
      const line = this.body.rows[bucket];
      const cells = line.cells;
      setText(cells[0].firstChild, String(bucket));
      setText(cells[1], bytes(row.bytes));
      setText(cells[2], milliseconds(row.allReduce));
      setText(cells[3], significant(row.bandwidth));
      setText(cells[4], row.lastRank < 0 ? "–" : row.wait > 0 ? `${milliseconds(row.wait)} for rank ${row.lastRank}` : "–");
      this.fillBar(cells[5], row, longest);
      setText(cells[0].lastChild, same[bucket] === undefined ? "" : same[bucket].equal ? "=" : "≠");
      line.classList.toggle("ddp-selected", bucket === selected);
      line.classList.toggle("ddp-differs", same[bucket]?.equal === false);
    });
    setText(this.summary, summarise(record, rows));
    this.drawVerdict(inspection);
  }

  // How long each rank waited, for the tooltip.
  waits(bucket) {
    const { ranks, wait, buckets } = this.record;
    const lines = ranks.map((rank, row) => `rank ${rank}: ${milliseconds(wait[row * buckets + bucket])} ms`);
    return `waited for the last rank\n${lines.slice(0, 16).join("\n")}${lines.length > 16 ? "\n…" : ""}`;
  }

  makeRow(bucket) {
    const number = element("button", { type: "button", class: "ddp-link", title: `parameters of bucket ${bucket}` }, String(bucket));
    const mark = element("span", { class: "ddp-mark", title: "=: gradients equal on all ranks; ≠: they differ" });
    const row = element("tr", {}, element("th", { scope: "row" }, number, mark));
    for (let column = 1; column < COLUMNS.length; column++) row.append(element("td"));
    const part = (index) => element("i", { class: `ddp-bar ddp-bar-${PARTS[index].name}` });
    row.cells[5].append(element("span", { class: "ddp-bars" }, part(3), part(4)), element("span", { class: "ddp-figures" }));
    row.addEventListener("click", () => this.actions.select(bucket));
    row.cells[4].addEventListener("pointerenter", (event) => (event.target.title = this.waits(bucket)));
    return row;
  }

  fillBar(cell, row, longest) {
    const [hidden, exposed] = cell.firstChild.children;
    hidden.style.width = `${((row.hidden || 0) / longest) * 100}%`;
    exposed.style.width = `${((row.exposed || 0) / longest) * 100}%`;
    setText(cell.lastChild, `${milliseconds(row.hidden)} | ${milliseconds(row.exposed)}`);
  }

  drawVerdict(inspection) {
    const state = inspection?.state;
    this.button.disabled = state === "asked";
    this.verdict.className = `ddp-verdict ddp-${state ?? "none"}`;
    setText(this.verdict, inspection?.text ?? "");
  }
}

// Per bucket: what the table shows; means over the ranks whose events have arrived.
function measure(record) {
  const rows = [];
  for (let bucket = 0; bucket < record.buckets; bucket++) {
    const column = (values) => record.ranks.map((_, row) => values[row * record.buckets + bucket]).filter((value) => !Number.isNaN(value));
    const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN);
    rows.push({
      bytes: record.bytes[bucket],
      allReduce: record.allReduce[bucket],
      bandwidth: record.bandwidth[bucket],
      lastRank: record.lastRank[bucket],
      wait: Math.max(0, ...column(record.wait)),
      hidden: mean(column(record.hidden)),
      exposed: mean(column(record.exposed)),
    });
  }
  return rows;
}

// One sentence on the step: how much of the communication was hidden, and who made whom wait longest.
function summarise(record, rows) {
  const parts = [];
  if (record.hiddenFraction !== null) {
    parts.push(`${Math.round(record.hiddenFraction * 100)} % of the communication hidden behind the backward`);
  }
  const wait = rows.reduce((best, row, bucket) => (row.wait > (rows[best]?.wait ?? 0) ? bucket : best), -1);
  if (wait >= 0) parts.push(`longest wait ${milliseconds(rows[wait].wait)} ms for rank ${rows[wait].lastRank} in bucket ${wait}`);
  return parts.length ? `Step ${record.step}: ${parts.join("; ")}.` : `Step ${record.step}: ${count(record.buckets, "bucket")}.`;
}
