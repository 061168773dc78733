// The dashboard: takes messages into a store, and draws at most once an animation frame, only while it is in view.

import { decodeSteps } from "./decode.js";
import { DetailView, RankTable } from "./detail_view.js";
import { MarkStore } from "./marks.js";
import { OverheadLine } from "./overhead.js";
import { Panels } from "./panels.js";
import { StepStore } from "./store.js";
import { Tabs } from "./tabs.js";
import { element, readTheme, setText } from "./theme.js";
import { TimelineView } from "./timeline_view.js";
import { Toolbar } from "./toolbar.js";

const EMPTY = "No step recorded yet: train with ddp_lab.DistributedDataParallel in a %%distributed cell.";
const CALM_MS = 1000; // between two pictures of a live step for readers who prefer reduced motion
const SPEAK_MS = 5000;
const TABLES_MS = 200;
const ASK_MS = 700; // between two questions for the gradients of a bucket

class View {
  constructor(model, store) {
    this.model = model;
    this.store = store;
    this.reducer = null;
    this.step = null;
    this.following = true;
    this.pinned = false; // the reader chose the model: others don't take its place
    this.bucket = null;
    this.draws = 0; // pictures
    this.updates = 0; // pictures that showed something new
    this.busy = 0; // milliseconds spent drawing
    this.wroteAt = 0;
    this.spoken = 0;
    this.asked = { text: "", at: 0 }; // for the gradients of a bucket
    this.id = Math.random().toString(36).slice(2);
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.build();
  }

  build() {
    this.root = element("div", { class: "ddp-lab", "data-lm-suppress-shortcuts": "true" });
    const actions = {
      select: (bucket) => this.set({ bucket: bucket === this.bucket ? null : bucket }),
      choose: (step) => this.set({ step, following: false }),
      step: (by) => this.toolbar.move(by),
      compare: () => this.compare(),
      redraw: () => this.schedule(true),
      say: (text) => this.say(text),
    };
    this.timeline = new TimelineView(this.root, { ...actions, redraw: () => this.schedule() }, (record, bucket) => this.describe(record, bucket), this.store.marks);
    this.toolbar = new Toolbar({
      choose: actions.choose,
      follow: (following) => this.set({ following }),
      reducer: (reducer) => this.set({ reducer, pinned: true, step: null, bucket: null, following: true }),
      axis: (axis) => this.timeline.setAxis(axis),
      mode: (mode) => this.timeline.setMode(mode),
      whole: (on) => this.timeline.setWhole(on),
      zoom: (factor) => (factor === null ? this.timeline.setWindow(null) : this.timeline.zoom(factor)),
    });
    this.badge = element("span", { class: "ddp-badge", hidden: true });
    this.panels = new Panels(this.model.get("tabs"), actions, this.timeline, this.badge);
    this.tabs = new Tabs([...this.panels.tabs.keys()], (name) => this.open(name));
    this.detail = new DetailView(() => this.set({ bucket: null }), actions);
    this.ranks = new RankTable();
    this.overhead = new OverheadLine();
    this.notice = element("div", { class: "ddp-notice", role: "alert", hidden: true });
    this.empty = element("p", { class: "ddp-empty" }, EMPTY);
    this.voice = element("div", { class: "ddp-voice", "aria-live": "polite" });
    this.content = element("div", { class: "ddp-content" }, this.tabs.node, this.toolbar.node, this.panels.node, this.detail.node);
    this.root.append(this.notice, this.empty, this.content, this.ranks.node, this.overhead.node, this.voice);
    this.root.statistics = () => {
      const { draws, updates, busy, store, record } = this;
      return { draws, updates, busy, received: store.received, step: record?.step ?? null, time: performance.now() };
    };
  }

  open(tab) {
    this.panels.open(tab);
    this.drawTabs();
    this.looked();
    this.schedule(true);
  }

  // Tells the kernel which views are seen, so that it computes what they need and nothing else.
  looked() {
    const views = this.inView ? this.panels.names : [];
    const text = JSON.stringify([views, this.reducer]);
    if (text === this.lookedAt) return;
    this.lookedAt = text;
    this.model.send({ type: "look", id: this.id, views, reducer: this.reducer });
  }

  mount(target) {
    target.append(this.root);
    this.inView = true;
    this.looked();
    this.seen = new IntersectionObserver(([entry]) => {
      this.inView = entry.isIntersecting;
      this.looked();
      if (this.inView) this.schedule();
    });
    this.seen.observe(this.root);
    this.sized = new ResizeObserver(() => this.schedule());
    this.sized.observe(this.root);
    // JupyterLab switches its theme by an attribute of the body.
    this.themed = new MutationObserver(() => this.refreshTheme());
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
    this.changed = () => this.schedule();
    this.store.listeners.add(this.changed);
    this.model.on("change", this.changed);
    this.tick = setInterval(() => this.everySecond(), 1000);
    this.schedule();
  }

  refreshTheme() {
    this.timeline.theme = null;
    this.detail.dots.chart.theme = null;
    this.panels.forgetTheme();
    this.schedule();
  }

  // A theme that no attribute announces, and what changes without a message; the pictures stay as they are.
  everySecond() {
    if (!this.inView) return;
    const begin = performance.now();
    const theme = JSON.stringify(readTheme(this.root));
    if (this.seenTheme !== undefined && theme !== this.seenTheme) this.refreshTheme();
    this.seenTheme = theme;
    this.drawFooter();
    this.busy += performance.now() - begin;
  }

  unmount() {
    this.inView = false;
    this.looked();
    for (const observer of [this.seen, this.sized, this.themed]) observer.disconnect();
    this.store.listeners.delete(this.changed);
    this.model.off("change", this.changed);
    clearInterval(this.tick);
    clearTimeout(this.later);
    cancelAnimationFrame(this.frame);
    this.root.remove();
  }

  set(state) {
    Object.assign(this, state);
    this.schedule(true);
  }

  // soon: the reader waits for it, so that tables don't keep to their pace
  schedule(soon = false) {
    if (soon) this.wroteAt = 0;
    if (this.frame || !this.inView) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      try {
        this.draw();
      } catch (error) {
        this.notice.hidden = false;
        setText(this.notice, `The dashboard could not draw: ${error.message}`);
        throw error;
      }
    });
  }

  draw() {
    const record = this.choose();
    this.empty.hidden = record !== null;
    this.content.hidden = record === null;
    const withTimeline = this.panels.has("timeline");
    // Sizes are read before anything is written: reading them later would make the browser lay the page out twice.
    const size = record && withTimeline && this.timeline.measure(record);
    const now = performance.now();
    const hurried = this.following && record !== this.record && now - this.wroteAt < TABLES_MS;
    if (record !== null) {
      if (record !== this.record) this.updates += 1;
      this.record = record;
      if (withTimeline) this.timeline.draw(record, this.records(), size, this.bucket, this.following);
      this.drawSelector(record, withTimeline);
    }
    if (hurried) this.later ??= setTimeout(() => this.catchUp(), TABLES_MS);
    else this.drawTables(record, now);
    this.draws += 1;
    this.busy += performance.now() - now;
  }

  catchUp() {
    this.later = null;
    this.wroteAt = 0;
    this.schedule();
  }

  // The steps of the model, in order.
  records() {
    return [...this.store.reducers.get(this.reducer).values()].sort((a, b) => a.step - b.step);
  }

  drawSelector(record, timeline) {
    const steps = this.store.steps(this.reducer);
    this.toolbar.draw({ steps, step: record.step, follow: this.following, reducer: this.reducer, reducers: this.titles(), timeline });
    const state = record.abandoned ? "abandoned" : record.complete ? "" : "in progress";
    this.badge.hidden = !state;
    setText(this.badge, state);
  }

  // Figures that change twenty times a second can't be read: the tables follow at most five times a second.
  drawTables(record, now) {
    this.wroteAt = now;
    const notice = this.model.get("notice");
    this.notice.hidden = !notice;
    setText(this.notice, notice);
    this.drawFooter();
    this.drawTabs();
    if (record === null) return;
    this.looked();
    const inspection = this.ofReducer("inspection");
    this.panels.draw({
      record,
      records: this.records(),
      assignment: this.model.get("assignments")[`${record.reducer}:${record.generation}`],
      bucket: this.bucket,
      inspection,
      findings: this.ofReducer("findings"),
      late: this.ofReducer("late"),
      readiness: this.ofReducer("readiness"),
      link: this.model.get("links")[`${record.reducer}:${record.generation}`],
    });
    const info = this.bucket === null ? undefined : this.describe(record, this.bucket);
    this.detail.draw(record, this.bucket, info, inspection, this.gradients(record));
    this.label(record);
  }

  drawFooter() {
    this.ranks.draw(this.panels.has("timeline") ? this.model.get("ranks") : []);
    this.overhead.draw(this.model.get("overhead"), this.busy);
  }

  drawTabs() {
    this.tabs.draw(this.panels.opened, { Findings: this.ofReducer("findings")?.items.length });
  }

  // What the kernel found out about the model that is shown.
  ofReducer(trait) {
    const found = this.model.get(trait);
    return found && found.reducer === this.reducer ? found : undefined;
  }

  // When each gradient of the chosen bucket was ready; asked for as the reader chooses, and now and then while steps go by.
  gradients(record) {
    if (this.bucket === null) return undefined;
    const text = JSON.stringify([record.reducer, record.step, this.bucket]);
    const now = performance.now();
    const other = this.asked.bucket !== this.bucket || this.asked.reducer !== record.reducer;
    if (text !== this.asked.text && record.complete && (other || now - this.asked.at > ASK_MS)) {
      this.asked = { text, at: now, bucket: this.bucket, reducer: record.reducer };
      this.model.send({ type: "gradients", reducer: record.reducer, step: record.step, bucket: this.bucket });
    }
    const found = this.store.gradients;
    return found && found.reducer === record.reducer && found.bucket === this.bucket && found.generation === record.generation ? found : undefined;
  }

  // The record to show: the chosen step (also when the store has let it go), else the newest of the chosen model.
  choose() {
    if (!this.store.newest) return null;
    if (!this.store.reducers.has(this.reducer) || (this.following && !this.pinned)) {
      if (this.reducer !== this.store.newest.reducer) this.bucket = null;
      this.reducer = this.store.newest.reducer;
    }
    const chosen = this.following ? null : this.store.get(this.reducer, this.step);
    if (!this.following) return chosen ?? (this.record?.reducer === this.reducer ? this.record : this.store.latest(this.reducer));
    const now = performance.now();
    if (this.calm.matches && this.record?.reducer === this.reducer && now - this.drawnAt < CALM_MS) return this.record;
    this.drawnAt = now;
    return this.store.latest(this.reducer);
  }

  titles() {
    const assignments = Object.values(this.model.get("assignments"));
    return [...this.store.reducers.keys()].map((id) => {
      const name = assignments.find((one) => one.reducer === id)?.module;
      return [id, name ? `${name} (reducer ${id})` : `reducer ${id}`];
    });
  }

  describe(record, bucket) {
    const assignment = this.model.get("assignments")[`${record.reducer}:${record.generation}`];
    const entry = assignment?.buckets.find((one) => one.bucket === bucket);
    if (!entry) return undefined;
    const parameters = entry.parameters.map((index) => assignment.parameters[index]);
    return { ...entry, parameters, rebuilt: assignment.rebuilt };
  }

  compare() {
    this.model.send({ type: "compare", reducer: this.reducer, step: this.record?.step ?? -1 });
  }

  label(record) {
    const now = performance.now();
    if (now - this.spoken < SPEAK_MS && this.labelled === record.step) return;
    if (now - this.spoken < SPEAK_MS && this.following) return;
    this.spoken = now;
    this.labelled = record.step;
    const text = `Bucket timeline of step ${record.step}: ${record.rankCount} ranks, ${record.buckets} buckets. ${this.panels.views.sync?.summary.textContent ?? ""}`;
    this.timeline.canvas.setAttribute("aria-label", text);
  }

  say(text) {
    setText(this.voice, text);
  }
}

// Hides the saved picture of this dashboard as long as a live one is on the page (see saved_picture.py).
function hidePicture(token) {
  const rule = element("style", { "data-ddp-lab": token }, `.ddp-lab-static-${token} { display: none !important; }`);
  document.head.append(rule);
  document.body.classList.add(`ddp-lab-live-${token}`);
  return () => {
    rule.remove();
    if (!document.querySelector(`style[data-ddp-lab="${token}"]`)) document.body.classList.remove(`ddp-lab-live-${token}`);
  };
}

export default () => {
  const store = new StepStore(new MarkStore());
  return {
    initialize({ model }) {
      const kept = model.get("kept");
      if (kept?.header && kept.body) store.add(decodeSteps(kept.header, kept.body));
      const receive = (content, buffers) => {
        if (content.type === "steps") store.add(decodeSteps(content, buffers[0]));
        else if (content.type === "reset") store.reset();
        else if (content.type === "forget marks") store.marks.reset();
        else if (content.type === "marks") store.marks.add(content.marks);
        else if (content.type === "gradients") store.take(content);
      };
      model.on("msg:custom", receive);
      // What was sent before this page knew the model: the kernel sends the steps that it holds.
      model.send({ type: "hello" });
      return () => model.off("msg:custom", receive);
    },
    render({ model, el }) {
      const view = new View(model, store);
      view.mount(el);
      const show = hidePicture(model.get("token"));
      return () => {
        view.unmount();
        show();
      };
    },
  };
};
