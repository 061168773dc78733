// The dashboard: takes messages into a store, and draws at most once an animation frame, only while it is in view.

import { element, setText } from "../charts/dom.js";
import { count } from "../charts/theme.js";
import { VIEWS } from "../generated.js";
import { Strip } from "../overview/strip.js";
import { MarkStore } from "../steps/marks.js";
import { StepStore, takeMessage } from "../steps/store.js";
import { DetailView, RankTable } from "../views/detail.js";
import { TimelineView } from "../views/timeline.js";
import { KernelFacts } from "./kernel_facts.js";
import { disableDead, hidePicture, Life, LifeLine, lastPicture } from "./life.js";
import { Panels } from "./panels.js";
import { Presence } from "./presence.js";
import { Alarm, OverheadLine, PlayerBar } from "./status_lines.js";
import { TabGroups } from "./tabs.js";
import { Toolbar } from "./toolbar.js";

const CALM_MS = 1000; // between two pictures of a live step for readers who prefer reduced motion
const SPEAK_MS = 5000;
const PICKED = 40; // the part of a run around a step that a reader picks: one of so many
const TABLES_MS = 200;
const LARGE = 200; // cells (ranks × buckets) from which tables are written at half that pace

class View {
  constructor(model, store, life) {
    this.model = model;
    this.store = store;
    this.life = life;
    this.reducer = null;
    this.step = null;
    this.record = null; // the displayed step
    this.following = true;
    this.pinned = false; // the user chose the model: no automatic change
    this.bucket = null;
    this.between = null; // [first, last]: the steps that the reader chose
    this.draws = 0; // pictures
    this.updates = 0; // pictures with a new step
    this.busy = 0; // milliseconds spent on drawing
    this.wroteAt = 0;
    this.stale = true; // the picture is out of date
    this.spoken = 0;
    this.id = Math.random().toString(36).slice(2);
    this.facts = new KernelFacts(model, store, (command) => life.send(command));
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.build();
  }

  build() {
    this.root = element("div", { class: "ddp-lab", "data-lm-suppress-shortcuts": "true" });
    const actions = {
      select: (bucket) => this.set({ bucket: bucket === this.bucket ? null : bucket }),
      choose: (step) => this.chooseStep(step),
      step: (by) => this.toolbar.move(by),
      compare: () => this.compare(),
      between: (between) => this.chooseSteps(between),
      pick: (step, of) => this.pick(step, of),
      show: (place) => this.show(place),
      redraw: () => this.schedule(true),
      say: (text) => this.say(text),
      send: (command) => this.life.send(command), // to the kernel: see dashboard.py
    };
    this.timeline = new TimelineView(
      this.root,
      { ...actions, redraw: () => this.schedule() },
      this.facts,
      this.store.marks,
    );
    this.toolbar = new Toolbar({
      choose: actions.choose,
      follow: (following) => (following ? this.chooseSteps(null) : this.set({ following })),
      reducer: (reducer) =>
        this.set({ reducer, pinned: true, step: null, bucket: null, following: true, between: null }),
      axis: (axis) => this.timeline.setAxis(axis),
      mode: (mode) => this.timeline.setMode(mode),
      whole: (on) => this.timeline.setWhole(on),
      zoom: (factor) => (factor === null ? this.timeline.setWindow(null) : this.timeline.zoom(factor)),
    });
    this.badge = element("span", { class: "ddp-badge", hidden: true });
    this.panels = new Panels(this.model.get("tabs"), actions, this.timeline, this.badge);
    this.tabs = new TabGroups(this.panels.questions, this.panels.titles, (name) => this.open(name));
    this.strip = new Strip(actions);
    this.detail = new DetailView(() => this.set({ bucket: null }), actions);
    this.ranks = new RankTable();
    this.overhead = new OverheadLine();
    this.alarm = new Alarm(actions);
    this.player = new PlayerBar(actions.send);
    this.lifeLine = new LifeLine(() => actions.send({ type: "adopt" }));
    this.notice = element("div", { class: "ddp-notice", role: "alert", hidden: true });
    this.empty = element("p", { class: "ddp-empty" }, this.facts.status("means").nothing);
    this.voice = element("div", { class: "ddp-voice", "aria-live": "polite" });
    this.content = element(
      "div",
      { class: "ddp-content" },
      this.tabs.node,
      this.empty,
      this.strip.node,
      this.toolbar.node,
      this.panels.node,
      this.detail.node,
    );
    this.root.append(
      this.lifeLine.node,
      this.notice,
      this.alarm.node,
      this.player.node,
      this.content,
      this.ranks.node,
      this.overhead.node,
      this.voice,
    );
    this.showWhatThereIs(null); // until the first draw
    this.presence = new Presence(this.root, {
      seen: () => this.looked(),
      show: () => this.schedule(),
      theme: () => this.refreshTheme(),
      second: () => this.everySecond(),
    });
    this.root.statistics = () => {
      const { draws, updates, busy, store, record } = this;
      return {
        draws,
        updates,
        busy,
        received: store.received,
        step: record?.step ?? null,
        complete: Boolean(record?.complete),
        time: performance.now(),
      };
    };
  }

  chooseStep(step) {
    this.set({ step, following: false });
    this.looked();
  }

  open(tab) {
    this.panels.open(tab);
    this.drawTabs();
    this.looked();
    this.schedule(true);
  }

  // Tells the kernel which views are in view, so that it computes only what they need.
  looked() {
    const views = this.presence.inView ? this.panels.names : [];
    this.life.look(this.presence.inView);
    const step = this.following || !views.some((name) => VIEWS[name].of_step) ? null : this.step;
    const text = JSON.stringify([views, this.reducer, this.between, step]);
    if (text === this.lookedAt) return;
    this.lookedAt = text;
    this.life.send({ type: "look", id: this.id, views, reducer: this.reducer, between: this.between, step });
  }

  // Shows these steps in all views; null: the newest ones.
  chooseSteps(between) {
    this.set({ between, following: between === null, step: null });
    if (between) this.life.send({ type: "between", reducer: this.reducer, first: between[0], last: between[1] });
    this.looked();
  }

  // Shows the step nearest to this one, or those around it if the page has none near; length: of the run, in steps
  pick(step, length) {
    const room = Math.max(Math.ceil(length / PICKED), 1);
    const nearest = this.nearest(step);
    if (nearest !== undefined && Math.abs(nearest - step) <= room) this.chooseStep(nearest);
    else this.chooseSteps([Math.max(step - room, 0), step + room]);
  }

  // The step nearest to this one that the page has.
  nearest(step) {
    const steps = this.records().map((one) => one.step);
    return steps.reduce((best, one) => (Math.abs(best - step) <= Math.abs(one - step) ? best : one), steps[0]);
  }

  // Opens a view at a rank, a bucket and a step, as far as they are named.
  show({ view, rank, bucket, step }) {
    const title = this.panels.titleOf(view) ?? this.panels.titleOf("findings");
    if (title === undefined) return;
    if (step !== null && step !== undefined) Object.assign(this, { step: this.nearest(step), following: false });
    if (bucket !== null && bucket !== undefined) this.bucket = bucket;
    this.open(title);
    if (view !== "timeline") return;
    requestAnimationFrame(() => {
      const row = this.record?.ranks.indexOf(rank) ?? -1;
      if (row >= 0) this.timeline.setCursor({ row, bucket: bucket ?? 0 });
    });
  }

  refreshTheme() {
    this.timeline.forgetTheme();
    this.strip.theme = null;
    this.detail.dots.forgetTheme();
    this.panels.forgetTheme();
    this.schedule();
  }

  everySecond() {
    const begin = performance.now();
    this.life.everySecond();
    const before = this.past?.what;
    this.drawLife();
    if (before !== this.past?.what) this.schedule(true);
    this.drawFooter();
    if (this.model.get("facts").step?.paused?.length) this.schedule(); // it shows for how long
    if (this.stale && this.record) this.request(); // there was no room
    if (this.behind && begin - this.wroteAt > 2 * TABLES_MS) this.drawTables(this.record, begin);
    this.busy += performance.now() - begin;
  }

  mount(target) {
    target.append(this.root);
    this.presence.begin();
    this.looked();
    // A picture of one step does not change with other steps.
    this.changed = (what) => {
      if (what === "reset") {
        Object.assign(this, { record: null, step: null, following: true, between: null, lookedAt: null });
        this.looked();
      }
      return what === "steps" && this.timeline.mode === "one" ? this.request() : this.schedule();
    };
    this.store.listeners.add(this.changed);
    this.died = () => this.schedule(true);
    this.life.listeners.add(this.died);
    this.told = () =>
      (this.later ??= setTimeout(() => this.catchUp(), Math.max(0, this.wroteAt + TABLES_MS - performance.now())));
    this.model.on("change", this.told);
    this.schedule();
  }

  unmount() {
    this.presence.end();
    this.looked();
    this.store.listeners.delete(this.changed);
    this.life.listeners.delete(this.died);
    this.model.off("change", this.told);
    clearTimeout(this.later);
    cancelAnimationFrame(this.frame);
    cancelAnimationFrame(this.writing);
    this.frame = this.writing = null;
    this.root.remove();
  }

  set(state) {
    Object.assign(this, state);
    this.schedule(true);
  }

  // Requests a new picture. soon: the user waits for it, so the tables are updated at once
  schedule(soon = false) {
    if (soon) this.wroteAt = 0;
    this.stale = true;
    this.request();
  }

  // Requests a new picture if the dashboard is in view.
  request() {
    if (this.frame || !this.presence.inView) return;
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
    this.showWhatThereIs(record);
    const withTimeline = this.panels.has("timeline");
    // Sizes are read before anything is written: reading them later would make the browser lay the page out twice.
    const size = record && withTimeline && this.timeline.measure(record);
    const now = performance.now();
    const pace = record && record.rankCount * record.buckets > LARGE ? 2 * TABLES_MS : TABLES_MS;
    const fresh = record !== this.record;
    const first = this.record === null; // shows the toolbar, which must be right at once
    const live = this.following && fresh && !first;
    const hurried = live && now - this.wroteAt < pace;
    if (record !== null) {
      if (fresh) this.updates += 1;
      this.record = record;
      const due = withTimeline && (this.stale || fresh);
      this.stale = due && !this.timeline.draw(record, () => this.records(), size, this.bucket, this.following);
    }
    if (hurried) this.later ??= setTimeout(() => this.catchUp(), pace);
    else if (live && this.wroteAt) this.write();
    else this.drawTables(record, now);
    this.draws += 1;
    this.busy += performance.now() - now;
  }

  // Writes the tables, as far as they are in view, in a frame of their own: a page that is busy for less than 50 ms at
  // a time answers at once.
  write() {
    this.wroteAt = performance.now();
    if (!this.presence.inView) return;
    this.writing ??= requestAnimationFrame(() => {
      this.writing = null;
      const begin = performance.now();
      this.drawTables(this.record, begin, true);
      this.busy += performance.now() - begin;
    });
  }

  // Before the first step, only the tabs that need none are shown.
  showWhatThereIs(record) {
    const { free, bare, anyFree } = this.panels;
    this.empty.hidden = record !== null || free;
    this.tabs.node.hidden = this.panels.tabs.size < 2 || (record === null && !anyFree);
    this.toolbar.node.hidden = record === null || bare;
    this.panels.node.hidden = record === null && !free;
    if (record === null) this.detail.node.hidden = this.strip.node.hidden = true;
  }

  catchUp() {
    this.later = null;
    if (this.record && this.following) this.write();
    else {
      this.wroteAt = 0;
      this.request();
    }
  }

  // The steps of the model, in order.
  records() {
    return this.store.records(this.reducer, this.between);
  }

  drawSelector(record, timeline) {
    const steps = this.records().map((one) => one.step);
    this.toolbar.draw({
      steps,
      step: record.step,
      follow: this.following,
      reducer: this.reducer,
      reducers: this.facts.titles(),
      timeline,
      single: !this.panels.has("overview"),
    });
    const state = record.abandoned
      ? "abandoned"
      : record.complete
        ? ""
        : this.past?.ended
          ? "unfinished"
          : "in progress";
    this.badge.hidden = !state;
    setText(this.badge, state);
  }

  // Numbers that change thirty times a second can't be read, and their layout costs more than the picture: text is
  // updated at most five times a second.
  // quick: rows out of view can wait until no more steps come
  drawTables(record, now, quick = false) {
    this.wroteAt = now;
    this.behind = quick;
    if (record !== null) this.drawSelector(record, this.panels.has("timeline"));
    if (record !== null) this.drawStrip(record);
    const notice = this.model.get("notice");
    this.notice.hidden = !notice;
    setText(this.notice, notice);
    this.drawLife();
    this.drawFooter();
    this.drawTabs();
    this.looked();
    const facts = { ...this.facts.all(record), gone: this.past?.kernel ? this.past.what : "" };
    this.alarm.draw(!this.past?.ended && this.model.get("control")?.live, facts.stepping, facts.injection);
    if (this.past?.ended)
      facts.control = { ...facts.control, live: false, stopped: facts.control?.live || facts.control?.stopped };
    this.panels.draw({ record, records: record ? this.records() : [], bucket: this.bucket, quick, ...facts });
    this.disable();
    if (record === null) return;
    const info = this.bucket === null ? undefined : this.facts.bucket(record, this.bucket);
    this.detail.draw(
      record,
      this.bucket,
      info,
      facts.inspection,
      this.facts.gradients(record, this.bucket),
      facts.means.compare,
    );
    this.label(record);
  }

  drawStrip(record) {
    const found = this.panels.bare ? undefined : this.facts.of("strip", record.reducer);
    const analysed = this.facts.of("findings", record.reducer)?.analysed;
    this.strip.draw(found, { between: this.between, step: record.step, marks: this.store.marks, analysed });
  }

  // Shows whether the kernel or the cluster is lost.
  drawLife() {
    this.past = this.life.state;
    const control = this.model.get("control");
    const again = this.facts.status("means").control
      ? "Start a cluster and run lab.dashboard() for a new dashboard."
      : "Run its cell again for a new dashboard.";
    this.lifeLine.draw(this.past, this.past && lastPicture(this.store, control?.shift), again);
  }

  // Runs last, after everything else that enables or disables controls.
  disable() {
    if (this.past || this.wasPast) disableDead([this.root, ...Object.values(this.panels.nodes)], this.past);
    this.wasPast = this.past;
  }

  drawFooter() {
    this.player.draw(this.facts.status("playback"));
    this.ranks.draw(
      this.panels.has("timeline") || this.panels.has("overview") ? this.model.get("ranks") : [],
      this.past,
      this.facts.status("cluster"),
    );
    this.overhead.node.hidden = this.panels.free || Boolean(this.past);
    if (!this.overhead.node.hidden) this.overhead.draw(this.facts.status("overhead"), this.busy);
  }

  drawTabs() {
    this.tabs.draw(
      this.panels.opened,
      { Findings: this.facts.of("findings", this.reducer)?.count },
      this.panels.unusable(this.facts.models()),
    );
  }

  // The record to show: the chosen step (even if the store no longer holds it), else the newest of the chosen model.
  choose() {
    if (!this.store.newest) return null;
    if (!this.store.reducers.has(this.reducer) || (this.following && !this.pinned)) {
      if (this.reducer !== this.store.newest.reducer) this.bucket = null;
      this.reducer = this.store.newest.reducer;
    }
    return this.following ? this.newestRecord() : this.chosenRecord();
  }

  chosenRecord() {
    const found = this.store.get(this.reducer, this.step);
    if (found) return found;
    if (this.between) return this.newestChosen() ?? this.record ?? this.store.latest(this.reducer);
    return this.record?.reducer === this.reducer ? this.record : this.store.latest(this.reducer);
  }

  newestRecord() {
    const now = performance.now();
    if (this.calm.matches && this.record?.reducer === this.reducer && now - this.drawnAt < CALM_MS) return this.record;
    this.drawnAt = now;
    return this.store.latest(this.reducer);
  }

  // The newest complete step of those that the reader chose.
  newestChosen() {
    const known = this.records();
    return known.findLast((one) => one.complete && !one.abandoned) ?? known.at(-1);
  }

  compare() {
    this.life.send({ type: "compare", reducer: this.reducer, step: this.record?.step ?? -1 });
  }

  label(record) {
    const now = performance.now();
    if (now - this.spoken < SPEAK_MS && this.labelled === record.step) return;
    if (now - this.spoken < SPEAK_MS && this.following) return;
    this.spoken = now;
    this.labelled = record.step;
    const text =
      `Timeline of step ${record.step}: ${count(record.rankCount, "rank")}, ` +
      `${count(record.buckets, this.facts.words(record).unit)}. ` +
      `${this.panels.views.sync?.summary.textContent ?? ""}`;
    this.timeline.canvas.setAttribute("aria-label", text);
  }

  say(text) {
    setText(this.voice, text);
  }
}

// Of the trait `facts` the kernel sends what has changed: the facts of one view. The page's copy of the trait takes
// them, for every view of this dashboard, and for the file that the notebook becomes.
function takeFacts(model, { view, facts }, [body]) {
  model.set("facts", { ...model.get("facts"), [view]: body ? { ...facts, body } : facts });
}

export default () => {
  const store = new StepStore(new MarkStore());
  const life = new Life();
  return {
    initialize({ model }) {
      const kept = model.get("kept");
      if (kept?.header && kept.body) takeMessage(store, kept.header, [kept.body]);
      const receive = (content, buffers) =>
        content.type === "facts" ? takeFacts(model, content, buffers) : takeMessage(store, content, buffers);
      model.on("msg:custom", receive);
      const end = life.begin(model);
      // Asks the kernel for the steps that it sent before this page knew the model.
      life.greet();
      return () => {
        model.off("msg:custom", receive);
        end();
      };
    },
    render({ model, el }) {
      const view = new View(model, store, life);
      view.mount(el);
      const show = hidePicture(model.get("token"));
      return () => {
        view.unmount();
        show();
      };
    },
  };
};
