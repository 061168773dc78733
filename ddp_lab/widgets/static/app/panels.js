// The views by name, as the dashboard's tabs hold them.

import { makeLegend } from "./toolbar.js";
import { element } from "../charts/dom.js";
import { BucketsView } from "../views/buckets.js";
import { CollectivesView } from "../views/collectives.js";
import { FindingsView } from "../views/findings.js";
import { GradientsView } from "../views/gradients.js";
import { OverlapView } from "../views/overlap.js";
import { RehearsalView } from "../views/rehearsal.js";
import { StepThroughView } from "../views/step_through.js";
import { StragglersView } from "../views/stragglers.js";
import { SyncView } from "../views/sync.js";
import { WhatIfView } from "../views/what_if.js";

// Each view: the title of its tab, its class, and how it draws the facts; free: needs no recorded step. The timeline
// belongs to the dashboard itself.
const VIEWS = {
  timeline: { title: "Timeline" },
  sync: { title: "Gradient sync", View: SyncView, draw: (view, facts) => view.draw(facts.record, facts.bucket, facts.inspection, facts.link, facts.means) },
  overlap: { title: "Overlap", View: OverlapView, draw: (view, facts) => view.draw(facts.records, facts.record.step) },
  stragglers: { title: "Stragglers", View: StragglersView, draw: (view, facts) => view.draw(facts.records, facts.late) },
  buckets: { title: "Buckets", View: BucketsView, draw: (view, facts) => view.draw(facts.record, facts.assignment, facts.bucket, facts.readiness, facts) },
  findings: { title: "Findings", View: FindingsView, draw: (view, facts) => view.draw(facts.findings, facts.means) },
  step: { title: "Step through", free: true, View: StepThroughView, draw: (view, facts) => view.draw(facts) },
  rehearsal: { title: "Fault injection", free: true, View: RehearsalView, draw: (view, facts) => view.draw(facts) },
  what_if: { title: "What if", free: true, View: WhatIfView, draw: (view, facts) => view.draw(facts) },
  gradients: { title: "Gradients", free: true, toolbar: true, View: GradientsView, draw: (view, facts) => view.draw(facts.model, facts.control, facts.watching, facts.norms, facts.record?.step ?? Infinity) },
  collectives: { title: "Collectives", free: true, View: CollectivesView, draw: (view, facts) => view.draw(facts.collective) },
};

export class Panels {
  // tabs: [[name of a view, ...], ...]; timeline: TimelineView; badge: a node in its heading
  constructor(tabs, actions, timeline, badge) {
    this.tabs = new Map(tabs.map((names) => [VIEWS[names[0]].title, names]));
    this.views = {};
    this.nodes = {};
    for (const name of tabs.flat()) {
      if (name === "timeline") {
        this.legend = makeLegend();
        this.timeline = timeline;
        this.nodes.timeline = element("section", { class: "ddp-left", "aria-label": "bucket timeline" }, element("h4", {}, "Bucket timeline ", badge), this.legend, timeline.node);
      } else {
        this.views[name] = new VIEWS[name].View(actions);
        this.nodes[name] = this.views[name].node;
      }
    }
    this.node = element("div", { class: "ddp-main", role: this.tabs.size > 1 ? "tabpanel" : null });
    this.open([...this.tabs.keys()][0]);
  }

  get names() {
    return this.tabs.get(this.opened);
  }

  has(name) {
    return this.names.includes(name);
  }

  // Whether the opened tab can be shown before the first step.
  get free() {
    return this.names.every((name) => VIEWS[name].free);
  }

  // Whether the opened tab does not use the choice of model and step.
  get bare() {
    return this.names.every((name) => VIEWS[name].free && !VIEWS[name].toolbar);
  }

  get anyFree() {
    return [...this.tabs.values()].flat().some((name) => VIEWS[name].free);
  }

  // Shows a tab's views, and removes the others from the page.
  open(title) {
    if (title === this.opened) return;
    this.opened = title;
    this.node.classList.toggle("ddp-two", this.names.length > 1);
    this.node.setAttribute("aria-label", title);
    this.node.replaceChildren(...this.names.map((name) => this.nodes[name]));
  }

  // facts: {record (null before the first step), records, bucket} and those of KernelFacts
  draw(facts) {
    this.legend?.classList.toggle("ddp-has-device", Boolean(facts.record?.device));
    this.legend?.classList.toggle("ddp-has-whole", this.timeline.whole);
    for (const name of this.names) if (this.views[name] && (facts.record || VIEWS[name].free)) VIEWS[name].draw(this.views[name], facts);
  }

  forgetTheme() {
    for (const view of Object.values(this.views)) for (const chart of [view.chart, view.waits, view.form?.chart.chart]) if (chart) chart.theme = null;
  }
}
