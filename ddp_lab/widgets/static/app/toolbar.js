// Step selector, follow-latest, model selector, time axis, zoom; and the legend.

import { MODES } from "../steps/many_steps.js";
import { PARTS } from "../generated.js";
import { element, setText } from "../charts/theme.js";

export class Toolbar {
  // actions: {choose(step), follow(on), reducer(id), axis(name), mode(name), whole(on), zoom(factor | null)}
  constructor(actions) {
    this.actions = actions;
    this.steps = [];
    this.model = element("select", { "aria-label": "model" });
    this.model.addEventListener("change", () => actions.reducer(Number(this.model.value)));
    this.modelLabel = element("label", { class: "ddp-field" }, "model ", this.model);
    this.back = this.button("‹", "previous step", () => this.move(-1));
    this.forward = this.button("›", "next step", () => this.move(1));
    this.range = element("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "step", class: "ddp-range" });
    this.range.addEventListener("input", () => this.chooseIndex(Number(this.range.value)));
    this.number = element("input", { type: "number", "aria-label": "step number", class: "ddp-number" });
    this.number.addEventListener("change", () => this.chooseNearest(Number(this.number.value)));
    this.number.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.chooseNearest(Number(this.number.value)); // JupyterLab takes the key's own effect
    });
    this.held = element("span", { class: "ddp-muted ddp-held" });
    this.follow = element("input", { type: "checkbox" });
    this.follow.addEventListener("change", () => actions.follow(this.follow.checked));
    this.axis = element("select", { "aria-label": "time axis" });
    this.axis.append(element("option", { value: "common" }, "common to all ranks"), element("option", { value: "rank" }, "each rank's own"));
    this.axis.addEventListener("change", () => actions.axis(this.axis.value));
    this.mode = element("select", { "aria-label": "steps shown" });
    this.mode.append(...Object.entries(MODES).map(([value, [text]]) => element("option", { value }, text)));
    this.mode.addEventListener("change", () => actions.mode(this.mode.value));
    this.whole = element("input", { type: "checkbox" });
    this.whole.addEventListener("change", () => actions.whole(this.whole.checked));
    const zoom = element("span", { class: "ddp-field ddp-zoom", role: "group", "aria-label": "zoom" });
    zoom.append(
      this.button("−", "zoom out (key −)", () => actions.zoom(1.5)),
      this.button("+", "zoom in (key +, or Ctrl and wheel; after a click the wheel alone; or drag along the time axis, or with Shift)", () => actions.zoom(1 / 1.5)),
      this.button("Reset", "show the whole step (key 0, or double click)", () => actions.zoom(null)),
    );
    const selector = element("span", { class: "ddp-field ddp-steps", role: "group", "aria-label": "step selector" });
    selector.append("step ", this.back, this.range, this.forward, this.number, this.held);
    const follow = element("label", { class: "ddp-field" }, this.follow, "follow latest");
    this.node = element("div", { class: "ddp-toolbar", role: "toolbar", "aria-label": "timeline controls" });
    const whole = element("label", { class: "ddp-field", title: "from the end of the step before: optimizer, forward, and what the program marked" }, this.whole, "whole step");
    this.ofTimeline = [element("label", { class: "ddp-field" }, "show ", this.mode), whole, element("span", { class: "ddp-field ddp-axis" }, element("label", { class: "ddp-field", title: "where each rank's time begins: at the first backward of all ranks, or at its own" }, "time zero ", this.axis), zoom)];
    this.node.append(this.modelLabel, selector, follow, ...this.ofTimeline);
  }

  button(text, title, action) {
    const made = element("button", { type: "button", class: "ddp-button", title, "aria-label": title }, text);
    made.addEventListener("click", action);
    return made;
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

  // state: {steps, step, follow, reducer, reducers: [[id, title]], timeline: whether it is on the page}
  draw(state) {
    for (const node of this.ofTimeline) node.hidden = !state.timeline;
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
    this.held.title = "the steps that this view holds";
    this.follow.checked = state.follow;
    this.back.disabled = index === 0;
    this.forward.disabled = index >= state.steps.length - 1;
    this.modelLabel.hidden = state.reducers.length < 2;
    const titles = state.reducers.map(([id, title]) => `${id}:${title}`).join("|");
    if (titles !== this.titles) {
      this.titles = titles;
      this.model.replaceChildren(...state.reducers.map(([id, title]) => element("option", { value: id }, title)));
    }
    this.model.value = String(state.reducer);
  }
}

export function makeLegend() {
  const items = PARTS.map((part) =>
    element("li", { title: part.title }, element("i", { class: `ddp-key ddp-bar-${part.name}`, "aria-hidden": "true" }, part.letter), part.name),
  );
  items.push(element("li", { title: "from a rank's backward begin until its last computation" }, element("i", { class: "ddp-key ddp-key-backward" }), "backward"));
  items.push(element("li", { title: "from the last computation until every bucket is written back" }, element("i", { class: "ddp-key ddp-key-finalize" }), "finalize"));
  items.push(element("li", { title: "before the backward: seen with “whole step”, or after panning", class: "ddp-of-whole" }, element("i", { class: "ddp-key ddp-key-forward" }), "forward"));
  items.push(element("li", { title: "when the device itself was busy with the collective", class: "ddp-of-device" }, element("i", { class: "ddp-key ddp-key-device" }), "on the device"));
  return element("ul", { class: "ddp-legend", "aria-label": "legend" }, ...items);
}
