// What all controls have in common: they ask the kernel, say what came of it, and say why they can't.

import { choice, element, field, setOptions, setText } from "../charts/dom.js";

const SILENCE_MS = 8000;

// Sends requests of one type, each with a number of its own, and knows whether the kernel has taken them.
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

  // state: of Asker; shown: {said, error} of the kernel
  draw(state, said, error) {
    const text = state === "silent" ? "The kernel does not answer. Is it running? A control needs a live cluster." : error || (state === "asked" ? "Asked …" : said);
    this.node.hidden = !text;
    this.node.classList.toggle("ddp-failed", Boolean(error) || state === "silent");
    setText(this.node, text ?? "");
  }
}

// Shows `form` where there is a live cluster; else says that controls need one.
export class NeedsCluster {
  constructor(...controls) {
    this.why = element("p", { class: "ddp-empty", hidden: true });
    this.fields = element("fieldset", { class: "ddp-controls", "data-asks": "ranks" }, ...controls);
    this.node = element("div", {}, this.why, this.fields);
  }

  draw(control) {
    const live = Boolean(control?.live);
    const shown = live || Boolean(control?.stopped); // of ranks that have ended they stay, disabled
    this.why.hidden = shown;
    this.fields.hidden = !shown;
    setText(this.why, control?.why ?? "Controls need a live cluster.");
    return live;
  }
}

// Which model a control is about: the one that is shown, or if that is gone the one that was active last, unless the
// reader chooses another. Seen where there are several.
export class ModelChoice {
  // actions: {redraw()}
  constructor(actions) {
    this.select = choice("model", [["", "the one that trains"]]);
    this.select.addEventListener("change", () => actions.redraw());
    this.node = field("model", this.select);
  }

  // facts: of KernelFacts; returns {model: its number or null, current: its newest assignment}
  pick({ models, model, current, control }) {
    const living = (control?.live && control.living) || models.map((one) => one.reducer);
    const offered = models.filter((one) => living.includes(one.reducer));
    this.node.hidden = models.length < 2;
    setOptions(this.select, [["", "the one that trains"], ...offered.map((one) => [one.reducer, `${one.module} (reducer ${one.reducer})`])]);
    const meant = this.select.value || (living.includes(model) ? "" : living.at(-1));
    const chosen = offered.find((one) => String(one.reducer) === String(meant));
    return chosen ? { model: chosen.reducer, current: chosen } : { model, current };
  }
}
