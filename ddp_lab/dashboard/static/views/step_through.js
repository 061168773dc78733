// Step through: training pauses at chosen points and continues by one event, one bucket, or to the next point.

import { Asker, ModelChoice, NeedsCluster, StatusLine } from "../app/control_status.js";
import { Blocks } from "../charts/blocks.js";
import { button, checkbox, choice, element, field, onKey, setOptions, setText } from "../charts/dom.js";
import { duration } from "../charts/theme.js";

const POINTS = [
  ["gradient_ready", "gradient ready", "a gradient has been computed; it is not yet in its bucket"],
  ["bucket_ready", "bucket ready", "a bucket has all its gradients; it is not yet launched"],
  ["launched", "launched", "a bucket's collective has been started"],
  ["reduced", "reduced", "a bucket's average has been computed; it is not yet written back"],
];
const STEPS = [
  ["event", "Next event", "e"],
  ["bucket", "Next bucket", "b"],
  ["breakpoint", "Next breakpoint", "n"],
];
const EMPTY = "No model yet. Wrap one in ddp_lab.DistributedDataParallel in a %%distributed cell.";

export class StepThroughView {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.asker = new Asker("step", actions);
    this.status = new StatusLine();
    this.ranks = new Map(); // rank -> checkbox
    this.points = new Map(
      POINTS.map(([name, text, title]) => [name, checkbox(text, title, null, name === "bucket_ready")]),
    );
    this.rankBox = element("span", { class: "ddp-field ddp-wrap", role: "group", "aria-label": "ranks that pause" });
    this.names = element("input", {
      type: "text",
      class: "ddp-text",
      size: "12",
      placeholder: "all",
      "aria-label": "parameters whose name contains",
      input: () => actions.redraw(),
    });
    this.matches = element("span", { class: "ddp-muted" });
    this.buckets = element("input", {
      type: "text",
      class: "ddp-text",
      size: "7",
      placeholder: "all",
      "aria-label": "buckets",
      title: "e.g. 0, 2",
    });
    this.node = element(
      "section",
      { class: "ddp-step", "aria-label": "step through", tabindex: "-1", keydown: (event) => this.key(event) },
      element("h4", {}, "Step through"),
      ...this.build(),
    );
  }

  build() {
    const points = element(
      "span",
      { class: "ddp-field ddp-wrap", role: "group", "aria-label": "points" },
      ...[...this.points.values()].map((one) => one.node),
    );
    this.model = new ModelChoice(this.actions);
    const where = element(
      "div",
      { class: "ddp-toolbar ddp-form" },
      this.model.node,
      element("span", { class: "ddp-field ddp-wrap" }, "pause at ", points),
      element("span", { class: "ddp-field ddp-wrap" }, "on ", this.rankBox),
      field("gradients of", this.names, this.matches),
      field("buckets", this.buckets),
    );
    this.pauseButton = button("Pause", "set these breakpoints (key p)", () => this.pause(), {
      class: "ddp-button ddp-primary",
      "aria-keyshortcuts": "p",
    });
    this.goOn = button(
      "Continue",
      "remove all breakpoints and continue training (key c)",
      () => this.ask({ do: "continue" }),
      { "aria-keyshortcuts": "c" },
    );
    this.nexts = STEPS.map(([until, text, key]) =>
      button(text, `${text.toLowerCase()} (key ${key})`, () => this.go(until), { "aria-keyshortcuts": key }),
    );
    this.who = choice("which ranks continue", [["", "all paused"]]);
    const keys = element(
      "span",
      { class: "ddp-muted ddp-keys" },
      "keys: p pause, c continue, e event, b bucket, n breakpoint",
    );
    const bar = element(
      "div",
      { class: "ddp-toolbar ddp-form", role: "toolbar", "aria-label": "pause and continue" },
      this.pauseButton,
      this.goOn,
      ...this.nexts,
      field("for", this.who),
      keys,
    );
    this.needs = new NeedsCluster(where, bar, this.status.node);
    this.state = element("p", { class: "ddp-sentence", role: "status" });
    this.blocks = new Blocks(this.actions);
    return [this.needs.node, this.state, this.blocks.node];
  }

  key(event) {
    const typed = ["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox";
    if (typed || this.needs.fields.hidden || this.needs.fields.disabled) return;
    const nexts = STEPS.map(([until, , key]) => [key, () => this.go(until)]);
    onKey(event, { p: () => this.pause(), c: () => this.ask({ do: "continue" }), ...Object.fromEntries(nexts) });
  }

  ask(command) {
    this.asker.ask({ reducer: this.reducer, ...command });
  }

  pause() {
    const chosen = [...this.ranks].filter(([, one]) => one.box.checked).map(([rank]) => rank);
    const all = chosen.length === this.ranks.size;
    this.ask({
      do: "pause",
      points: [...this.points].filter(([, one]) => one.box.checked).map(([name]) => name),
      ranks: all ? null : chosen,
      parameters: this.askedNames(),
      buckets: this.buckets.value
        .split(/[,;\s]+/)
        .filter(Boolean)
        .map(Number),
    });
  }

  go(until) {
    this.ask({ do: "go", until, ranks: this.who.value === "" ? null : [Number(this.who.value)] });
  }

  chosenNames() {
    const part = this.names.value.trim();
    return part ? (this.assignment?.parameters ?? []).map((one) => one.name).filter((name) => name.includes(part)) : [];
  }

  // Without a match the ranks reject the text, and report a similar name.
  askedNames() {
    const part = this.names.value.trim();
    const found = this.chosenNames();
    return part && !found.length ? [part] : found;
  }

  // facts: of KernelFacts
  draw(facts) {
    const { control, stepping } = facts;
    const { model: reducer, current: assignment } = this.model.pick(facts);
    this.reducer = reducer;
    this.assignment = assignment;
    const live = this.needs.draw(control);
    this.drawForm(assignment);
    this.status.draw(this.asker.state(control), stepping?.said, stepping?.error);
    const ranks = stepping?.ranks ?? [];
    const paused = stepping?.paused ?? [];
    for (const one of this.nexts) one.disabled = !paused.length;
    setOptions(this.who, [["", "all paused"], ...paused.map((rank) => [rank, `rank ${rank}`])]);
    this.state.hidden = !live;
    const text = headline(assignment, stepping);
    if (live && text !== this.said) {
      this.said = text;
      if (paused.length)
        this.actions.say(
          ranks
            .filter((one) => one.kind === "paused")
            .map((one) => `rank ${one.rank} ${one.text}`)
            .join(". "),
        );
    }
    setText(this.state, text);
    this.blocks.draw(stepping?.blocks ?? []);
  }

  drawForm(assignment) {
    const text = JSON.stringify(assignment?.group_ranks ?? []);
    if (text !== this.shownRanks) {
      this.shownRanks = text;
      this.ranks = new Map(
        (assignment?.group_ranks ?? []).map((rank) => [rank, checkbox(`rank ${rank}`, "", null, true)]),
      );
      this.rankBox.replaceChildren(...[...this.ranks.values()].map((one) => one.node));
    }
    const part = this.names.value.trim();
    setText(this.matches, part ? `${this.chosenNames().length} of ${assignment?.parameters.length ?? 0}` : "");
  }

  forgetTheme() {
    this.blocks.forgetTheme();
  }
}

function headline(assignment, stepping) {
  if (!assignment) return EMPTY;
  if (stepping?.ended && !stepping.armed?.length)
    return "The breakpoints were removed: the cell was interrupted, or failed on a rank.";
  const [armed, paused] = [stepping?.armed ?? [], stepping?.paused ?? []];
  const list = (ranks) => `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")}`;
  if (paused.length) {
    const since = Math.min(...stepping.ranks.map((one) => one.since ?? Infinity));
    const long = duration(Date.now() / 1000 - since);
    return `Training is paused: ${list(paused)}, for ${long}. No process group times out meanwhile.`;
  }
  if (armed.length)
    return `Breakpoints are set on ${list(armed)}. No rank has reached one yet. Run a cell that trains.`;
  return "No breakpoints. Choose where to pause, press Pause, and run a cell that trains.";
}
