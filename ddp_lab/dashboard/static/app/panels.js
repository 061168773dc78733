// The views as the dashboard's tabs hold them; views/__init__.py lists them.

import { element, setText } from "../charts/dom.js";
import { VIEWS } from "../generated.js";
import { OverviewView } from "../overview/overview.js";
import { BucketsView } from "../views/buckets.js";
import { CollectivesView } from "../views/collectives.js";
import { FaultInjectionView } from "../views/fault_injection.js";
import { GradientsView } from "../views/gradients.js";
import { SceneView } from "../views/scene_view.js";
import { StepThroughView } from "../views/step_through.js";
import { SyncView } from "../views/sync.js";
import { WhatIfView } from "../views/what_if.js";
import { layoutWords } from "./kernel_facts.js";
import { makeLegend, nameReduction } from "./toolbar.js";

// The views with a script of their own: class, and how it draws the facts. The timeline is the dashboard's own.
const DRAWN = {
  overview: [OverviewView, (view, facts) => view.draw(facts)],
  sync: [SyncView, (view, facts) => view.draw(facts.record, facts.bucket, facts)],
  buckets: [
    BucketsView,
    (view, facts) => view.draw(facts.record, facts.assignment, facts.bucket, facts.readiness, facts),
  ],
  step: [StepThroughView, (view, facts) => view.draw(facts)],
  fault_injection: [FaultInjectionView, (view, facts) => view.draw(facts)],
  what_if: [WhatIfView, (view, facts) => view.draw(facts)],
  gradients: [
    GradientsView,
    (view, facts) =>
      view.draw(facts.model, facts.control, facts.watching, facts.blocksOf("gradients"), facts.record?.step),
  ],
  collectives: [CollectivesView, (view, facts) => view.draw(facts.collective)],
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
        this.heading = element("span");
        this.timeline = timeline;
        this.nodes.timeline = element(
          "section",
          { class: "ddp-left", "aria-label": "timeline" },
          element("h4", {}, this.heading, badge),
          this.legend,
          timeline.node,
        );
      } else {
        const [View] = DRAWN[name] ?? [SceneView];
        this.views[name] = new View(actions, name, VIEWS[name]);
        this.nodes[name] = this.views[name].node;
      }
    }
    this.node = element("div", { class: "ddp-main", role: this.tabs.size > 1 ? "tabpanel" : null });
    this.open([...this.tabs.keys()][0]);
  }

  // The titles of the tabs, each with what its views show.
  get titles() {
    return new Map([...this.tabs].map(([title, names]) => [title, names.map((name) => VIEWS[name].about).join("\n")]));
  }

  // The questions to which tabs belong: [[question, [title, ...]], ...]; a tab without one is its own.
  get questions() {
    const found = new Map();
    for (const [title, [name]] of this.tabs) {
      const question = VIEWS[name].question || title;
      found.set(question, [...(found.get(question) ?? []), title]);
    }
    return [...found];
  }

  // The title of the tab that has this view, or undefined.
  titleOf(view) {
    return [...this.tabs].find(([, names]) => names.includes(view))?.[0];
  }

  // The titles of the tabs that have nothing to show for these models; never of the opened one.
  unusable(models) {
    const usable = new Set(models.flatMap((one) => layoutWords(one).views));
    const useless = (name) => VIEWS[name].groups && !usable.has(name);
    return new Set(
      [...this.tabs].filter(([title, names]) => title !== this.opened && names.every(useless)).map(([title]) => title),
    );
  }

  get names() {
    return this.tabs.get(this.opened);
  }

  has(name) {
    return this.names.includes(name);
  }

  // Whether the opened tab can be shown before the first step.
  get free() {
    return this.names.every((name) => !VIEWS[name].steps);
  }

  // Whether the opened tab does not use the choice of model and step.
  get bare() {
    return this.names.every((name) => !VIEWS[name].model);
  }

  get anyFree() {
    return [...this.tabs.values()].flat().some((name) => !VIEWS[name].steps);
  }

  // Shows a tab's views, and removes the others from the page.
  open(title) {
    if (title === this.opened) return;
    this.opened = title;
    this.node.classList.toggle("ddp-two", this.names.length > 1);
    this.node.classList.toggle("ddp-titled", this.tabs.size > 1 && this.names.length === 1); // by its tab
    this.node.setAttribute("aria-label", title);
    this.node.replaceChildren(...this.names.map((name) => this.nodes[name]));
  }

  // facts: {record (null before the first step), records, bucket} and those of KernelFacts
  draw(facts) {
    if (this.legend) this.drawHeading(facts);
    this.legend?.classList.toggle("ddp-has-device", Boolean(facts.record?.device));
    this.legend?.classList.toggle("ddp-has-whole", this.timeline.whole);
    for (const name of this.names) {
      const view = this.views[name];
      if (!view || (!facts.record && VIEWS[name].steps)) continue;
      if (DRAWN[name]) DRAWN[name][1](view, facts);
      else view.draw(facts.blocksOf(name), facts.record?.step, facts.gone);
    }
  }

  // What is reduced in the timeline, and by what.
  drawHeading({ words = layoutWords() }) {
    setText(this.heading, `${words.title} timeline `);
    nameReduction(this.legend, words);
  }

  forgetTheme() {
    for (const view of Object.values(this.views)) {
      view.forgetTheme?.();
      for (const chart of [view.chart, view.waits]) if (chart) chart.theme = null;
    }
  }
}
