// The common part of all controls: requests to the kernel, their status, and why a control is unavailable.

import { choice, element, field, setOptions, setText } from "../charts/dom.js";

const SILENCE_MS = 8000;

// Sends requests of one type, each with its own id, and knows whether the kernel has received them.
export class Asker {
  // actions: {send(command), redraw()}
  constructor(type, actions) {
    this.type = type;
    this.actions = actions;
    this.waiting = null; // {id, at}
  }

  ask(command) {
    const id = Math.random().toString(36).slice(2);
    this.waiting = { id, at: performance.now() };
    this.actions.send({ type: this.type, id, ...command });
    this.actions.redraw();
    setTimeout(() => this.actions.redraw(), SILENCE_MS + 50);
  }

  // "asked", "silent" or null
  state(control) {
    if (this.waiting && control?.heard?.includes(this.waiting.id)) this.waiting = null;
    if (!this.waiting) return null;
    return performance.now() - this.waiting.at > SILENCE_MS ? "silent" : "asked";
  }
}

// A line that says what was done, or what went wrong.
export class StatusLine {
  constructor() {
    this.node = element("p", { class: "ddp-status", role: "status", hidden: true });
  }

  // state: of Asker; said, error: from the kernel
  draw(state, said, error) {
    const text =
      state === "silent"
        ? "The kernel does not respond. Is it running? Controls need a running cluster."
        : error || (state === "asked" ? "Requested …" : said);
    this.node.hidden = !text;
    this.node.classList.toggle("ddp-failed", Boolean(error) || state === "silent");
    setText(this.node, text ?? "");
  }
}

// Shows the controls if there is a running cluster; otherwise shows why there are none.
export class NeedsCluster {
  constructor(...controls) {
    this.why = element("p", { class: "ddp-empty", hidden: true });
    this.fields = element("fieldset", { class: "ddp-controls", "data-asks": "ranks" }, ...controls);
    this.node = element("div", {}, this.why, this.fields);
  }

  draw(control) {
    const live = Boolean(control?.live);
    const shown = live || Boolean(control?.stopped); // after the ranks have stopped they stay, disabled
    this.why.hidden = shown;
    this.fields.hidden = !shown;
    setText(this.why, control?.why ?? "Controls need a running cluster.");
    return live;
  }
}

// The model that a control is for: the displayed one, or if that no longer exists the last active one, unless the user
// chooses another. Visible if there are several.
export class ModelChoice {
  // actions: {redraw()}
  constructor(actions) {
    this.select = choice("model", [["", "the one that is training"]]);
    this.select.addEventListener("change", () => actions.redraw());
    this.node = field("model", this.select);
  }

  // facts: of KernelFacts; returns {model: its number or null, current: its newest assignment}
  pick({ models, model, current, control }) {
    const living = (control?.live && control.living) || models.map((one) => one.reducer);
    const offered = models.filter((one) => living.includes(one.reducer));
    this.node.hidden = models.length < 2;
    setOptions(this.select, [
      ["", "the one that is training"],
      ...offered.map((one) => [one.reducer, `${one.module} (model ${one.reducer})`]),
    ]);
    const meant = this.select.value || (living.includes(model) ? "" : living.at(-1));
    const chosen = offered.find((one) => String(one.reducer) === String(meant));
    return chosen ? { model: chosen.reducer, current: chosen } : { model, current };
  }
}
