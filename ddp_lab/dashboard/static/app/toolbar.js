// Step selector, follow-latest, model selector, time axis, zoom; and the legend.

import { button, checkbox, choice, element, field, legend, setOptions, setText } from "../charts/dom.js";
import { PARTS } from "../generated.js";
import { MODES } from "../steps/many_steps.js";

export class Toolbar {
  // actions: {choose(step), follow(on), reducer(id), axis(name), mode(name), whole(on), zoom(factor | null)}
  constructor(actions) {
    this.actions = actions;
    this.steps = [];
    const named = (text, title, action) => button(text, title, action, { "aria-label": title });
    this.model = choice("model", [], () => actions.reducer(Number(this.model.value)));
    this.modelLabel = field("model", this.model);
    this.back = named("‹", "previous step", () => this.move(-1));
    this.forward = named("›", "next step", () => this.move(1));
    this.range = element("input", {
      type: "range",
      min: "0",
      max: "0",
      value: "0",
      "aria-label": "step",
      class: "ddp-range",
      input: () => this.chooseIndex(Number(this.range.value)),
    });
    const typed = () => this.chooseNearest(Number(this.number.value));
    const keydown = (event) => event.key === "Enter" && typed(); // JupyterLab takes the key's own effect
    this.number = element("input", {
      type: "number",
      "aria-label": "step number",
      class: "ddp-number",
      change: typed,
      keydown,
    });
    this.held = element("span", { class: "ddp-muted ddp-held" });
    const follow = checkbox("follow latest", null, () => actions.follow(this.follow.checked));
    this.follow = follow.box;
    const axis = choice(
      "time axis",
      [
        ["common", "common to all ranks"],
        ["rank", "each rank's own"],
      ],
      () => actions.axis(axis.value),
    );
    const mode = choice(
      "steps shown",
      Object.entries(MODES).map(([value, [text]]) => [value, text]),
      () => actions.mode(mode.value),
    );
    const zoom = element(
      "span",
      { class: "ddp-field ddp-zoom", role: "group", "aria-label": "zoom" },
      named("−", "zoom out (key −)", () => actions.zoom(1.5)),
      named(
        "+",
        "zoom in (key +, Ctrl + wheel, the wheel alone after a click, or drag along the time axis or with Shift)",
        () => actions.zoom(1 / 1.5),
      ),
      named("Reset", "show the whole step (key 0, or double-click)", () => actions.zoom(null)),
    );
    const selector = element(
      "span",
      { class: "ddp-field ddp-steps", role: "group", "aria-label": "step selector" },
      "step ",
      this.back,
      this.range,
      this.forward,
      this.number,
      this.held,
    );
    const whole = checkbox(
      "whole step",
      "start at the end of the previous step: shows optimizer, forward and the program's annotations",
      () => actions.whole(whole.box.checked),
    );
    const zero = element(
      "label",
      { class: "ddp-field", title: "zero of the time axis: the first backward of all ranks, or each rank's own" },
      "time zero ",
      axis,
    );
    this.ofStep = [selector, follow.node];
    this.ofTimeline = [field("show", mode), whole.node, element("span", { class: "ddp-field ddp-axis" }, zero, zoom)];
    this.node = element(
      "div",
      { class: "ddp-toolbar", role: "toolbar", "aria-label": "timeline controls" },
      this.modelLabel,
      ...this.ofStep,
      ...this.ofTimeline,
    );
  }

  move(by) {
    const index = this.steps.indexOf(this.shown);
    this.chooseIndex(index < 0 ? this.steps.length - 1 : index + by);
  }

  chooseIndex(index) {
    const step = this.steps[Math.min(Math.max(index, 0), this.steps.length - 1)];
    if (step !== undefined) this.actions.choose(step);
  }

  chooseNearest(wanted) {
    const distance = (step) => Math.abs(step - wanted);
    const nearest = this.steps.reduce((best, step) => (distance(step) < distance(best) ? step : best), this.steps[0]);
    if (nearest !== undefined) this.actions.choose(nearest);
  }

  // state: {steps, step, follow, reducer, reducers: [[id, title]], timeline: whether it is on the
  // page; single: whether a view is about one step}
  draw(state) {
    for (const node of this.ofTimeline) node.hidden = !state.timeline;
    for (const node of this.ofStep) node.hidden = !state.single;
    this.steps = state.steps;
    this.shown = state.step;
    const index = Math.max(state.steps.indexOf(state.step), 0);
    this.range.max = String(Math.max(state.steps.length - 1, 0));
    this.range.value = String(index);
    this.range.setAttribute("aria-valuetext", `step ${state.step}`);
    if (document.activeElement !== this.number) this.number.value = String(state.step);
    this.number.min = String(state.steps[0] ?? 0);
    this.number.max = String(state.steps.at(-1) ?? 0);
    setText(this.held, state.steps.length ? `of ${state.steps[0]}–${state.steps.at(-1)}` : "");
    this.held.title = "the steps available in this view";
    this.follow.checked = state.follow;
    this.back.disabled = index === 0;
    this.forward.disabled = index >= state.steps.length - 1;
    this.modelLabel.hidden = state.reducers.length < 2;
    setOptions(this.model, state.reducers);
    this.model.value = String(state.reducer);
  }
}

export function makeLegend() {
  const made = legend("legend", [
    ...PARTS.map(({ name, label, title }) => [label, `ddp-bar-${name}`, title]),
    ["backward", "ddp-key-backward", "from the start of a rank's backward to the end of its computation"],
    ["finalize", "ddp-key-finalize", "from the end of the computation until all gradients are written back"],
    ["forward", "ddp-key-forward", "before the backward; shown with “whole step”, or after panning"],
    ["on the device", "ddp-key-device", "time in which the collective ran on the device"],
  ]);
  PARTS.forEach(({ letter }, index) => setText(made.children[index].firstChild, letter));
  made.children[PARTS.length + 2].classList.add("ddp-of-whole");
  made.lastChild.classList.add("ddp-of-device");
  return made;
}

// Names the collective that reduces; where no single gradient is recorded, nothing is seen filling.
export function nameReduction(made, { reduction, gradients, exposed }) {
  const item = (name) => made.children[PARTS.findIndex((one) => one.name === name)];
  item("filling").hidden = !gradients;
  if (item("reducing").lastChild.data !== reduction) item("reducing").lastChild.data = reduction;
  if (item("exposed").title !== exposed) item("exposed").title = exposed;
}
