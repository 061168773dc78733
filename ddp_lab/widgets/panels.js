// The views by name, as the dashboard's tabs hold them.

import { BucketsView } from "./buckets_view.js";
import { FindingsView } from "./findings_view.js";
import { OverlapView } from "./overlap_view.js";
import { StragglersView } from "./stragglers_view.js";
import { SyncView } from "./sync_view.js";
import { element } from "./theme.js";
import { makeLegend } from "./toolbar.js";

export const TITLES = { timeline: "Timeline", sync: "Gradient sync", overlap: "Overlap", stragglers: "Stragglers", buckets: "Buckets", findings: "Findings" };

const VIEWS = { sync: SyncView, overlap: OverlapView, stragglers: StragglersView, buckets: BucketsView, findings: FindingsView };

export class Panels {
  // tabs: [[name of a view, ...], ...]; timeline: TimelineView; badge: a node in its heading
  constructor(tabs, actions, timeline, badge) {
    this.tabs = new Map(tabs.map((names) => [TITLES[names[0]], names]));
    this.views = {};
    this.nodes = {};
    for (const name of tabs.flat()) {
      if (name === "timeline") {
        this.legend = makeLegend();
        this.timeline = timeline;
        this.nodes.timeline = element("section", { class: "ddp-left", "aria-label": "bucket timeline" }, element("h4", {}, "Bucket timeline ", badge), this.legend, timeline.node);
      } else {
        this.views[name] = new VIEWS[name](actions);
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

  // Puts a tab's views on the page, and takes the others from it.
  open(title) {
    if (title === this.opened) return;
    this.opened = title;
    this.node.classList.toggle("ddp-two", this.names.length > 1);
    this.node.setAttribute("aria-label", title);
    this.node.replaceChildren(...this.names.map((name) => this.nodes[name]));
  }

  // facts: {record, records, assignment, bucket, inspection, late, findings, readiness, link}
  draw(facts) {
    const { record, records, assignment, bucket } = facts;
    this.legend?.classList.toggle("ddp-has-device", Boolean(record.device));
    this.legend?.classList.toggle("ddp-has-whole", this.timeline.whole);
    const draw = {
      sync: (view) => view.draw(record, bucket, facts.inspection, facts.link),
      overlap: (view) => view.draw(records, record.step),
      stragglers: (view) => view.draw(records, facts.late),
      buckets: (view) => view.draw(record, assignment, bucket, facts.readiness),
      findings: (view) => view.draw(facts.findings),
    };
    for (const name of this.names) if (this.views[name]) draw[name](this.views[name]);
  }

  forgetTheme() {
    for (const view of Object.values(this.views)) for (const chart of [view.chart, view.waits]) if (chart) chart.theme = null;
  }
}
