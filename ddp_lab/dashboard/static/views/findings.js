// Findings: what to change, the largest estimated saving first.

import { button, element, section, setText } from "../charts/dom.js";

// Calls and settings in a suggested fix, shown as code.
const CODE = /([A-Za-z_][\w.]*\([^()]*\)|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+(?:=[\w.[\], ]*[\w\]])?)/;

export class FindingsView {
  // actions: {show(place), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.state = element("p", { class: "ddp-sentence", role: "status" });
    this.list = element("ol", { class: "ddp-findings", "aria-label": "findings, the largest estimated saving first" });
    this.note = element(
      "p",
      { class: "ddp-muted ddp-sentence" },
      "Savings are estimates for each change alone; two that save the same waiting time don’t add up.",
    );
    this.node = section("findings-view", "findings", "Findings", this.state, this.list, this.note);
  }

  // found: from the kernel: {items: [...], steps}; undefined before its first answer; means: see dashboard.py; records:
  // the steps
  draw(found, means, records) {
    this.records = records;
    const items = found?.items ?? [];
    this.note.hidden = items.length < 2;
    setText(this.state, findingHeadline(found, means));
    const text = JSON.stringify(items);
    if (text === this.shown) return;
    this.shown = text;
    const most = Math.max(...items.map((one) => one.gain), 1);
    this.list.replaceChildren(...items.map((one) => this.item(one, most)));
  }

  item(one, most) {
    const bar = element("i", {
      class: "ddp-gain-bar",
      "aria-hidden": "true",
      style: `width: ${Math.max((one.gain / most) * 100, 1)}%`,
    });
    const body = element(
      "div",
      {},
      element("strong", {}, one.title),
      element("p", {}, one.evidence),
      element("p", { class: "ddp-remedy" }, ...withCode(one.remedy)),
    );
    if (placeOf(one, []).view !== "findings")
      body.append(
        button("Show me", "Open the view where this can be seen", () => this.actions.show(placeOf(one, this.records))),
      );
    return element(
      "li",
      {},
      element(
        "div",
        { class: "ddp-gain" },
        element("b", {}, `${savingOf(one)} %`),
        element("span", {}, "of the step"),
        bar,
      ),
      body,
    );
  }
}

// Kinds of findings about parameter groups.
const OF_GROUPS = new Set([
  "late-parameter-group",
  "exposed-unshard",
  "exposed-backward-unshard",
  "parameter-groups-too-small",
  "parameter-group-too-large",
]);

function withCode(text) {
  return text.split(CODE).map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

export function savingOf(one) {
  return one.gain >= 10 ? one.gain.toFixed(0) : one.gain >= 0.1 ? one.gain.toFixed(1) : "< 0.1";
}

// Where a finding can be seen: {view, rank, bucket, step}; the step is the one of these records in which it shows most.
export function placeOf({ kind, rank, bucket }, records) {
  if (OF_GROUPS.has(kind)) return { view: "parameter_groups" };
  if (["mesh-dimension-between-hosts", "unchanged-buffers"].includes(kind)) return { view: "groups" };
  const [ofRank, ofBucket] = [rank, bucket].map((one) => one !== null && one !== undefined);
  if (!ofRank && !ofBucket) return { view: "findings" };
  const late = (record, at) =>
    ofRank && record.lastRank[at] !== rank ? 0 : record[ofRank ? "alone" : "allReduce"][at] || 0;
  const worst = (record) =>
    ofBucket ? late(record, bucket) : record.alone.reduce((most, _, at) => Math.max(most, late(record, at)), 0);
  const best = records
    .filter((one) => one.complete && !one.abandoned)
    .reduce((most, record) => (most && worst(most) >= worst(record) ? most : record), null);
  const at =
    best && !ofBucket
      ? best.alone.reduce((most, _, index) => (late(best, index) > late(best, most) ? index : most), 0)
      : bucket;
  return { view: "timeline", rank: ofRank ? rank : null, bucket: at ?? null, step: best?.step ?? null };
}

export function findingHeadline(found, means) {
  if (!found) return "Waiting for the analysis.";
  if (!found.steps) return `No step is complete on every rank yet.${means.control ? " Train a few steps." : ""}`;
  return found.text;
}
