// The switch between the views of a cell's output, in the places that cells have: see the note in by_rank.py.

import { element, setText } from "../charts/dom.js";
import { Pages } from "./rank_pages.js";

const PLACE = "ddp-lab-output";
const MERGED = "merged";
const CHOICES = [
  [MERGED, "merged", "All ranks' output together: equal lines once, with their ranks"],
  ["tabs", "tabs", "One rank's output at a time"],
  ["side-by-side", "side by side", "The ranks' outputs beside each other"],
];

// The cells of one kernel: their views, and the outputs by rank that this page has asked for.
class KernelCells {
  constructor(model) {
    this.model = model;
    this.rendermime = model.widget_manager?.rendermime;
    this.outputs = new Map(); // cell -> {groups, states, blocks: rank -> place -> block, ended, kept}
    this.shown = new Set(); // of SwitchedOutput
    this.lost = false;
    this.redraw = () => this.shown.forEach((one) => one.draw());
    const checked = () => this.tell(() => model.send({})); // fails if the kernel was restarted or has stopped
    this.on = { "change:views": this.redraw, "msg:custom": (content) => this.take(content), comm_live_update: checked };
    for (const [name, action] of Object.entries(this.on)) model.on(name, action);
  }

  end() {
    for (const [name, action] of Object.entries(this.on)) this.model.off(name, action);
  }

  choose(cell, view) {
    this.model.set("views", { ...this.model.get("views"), [cell]: view });
    this.model.set("view", view);
    this.tell(() => this.model.save_changes());
  }

  ask(cell) {
    if (this.outputs.has(cell)) return;
    this.outputs.set(cell, { kept: true, blocks: new Map(), groups: null });
    this.tell(() => this.model.send({ cell }));
  }

  // Sends something, unless the kernel has stopped.
  tell(send) {
    try {
      if (!this.lost) send();
    } catch {
      this.lost = true;
      this.redraw();
    }
  }

  take({ cell, kept, whole, ended, groups, states, blocks }) {
    const output = this.outputs.get(cell);
    if (!output) return; // another page has asked
    if (kept) {
      if (whole) output.blocks.clear();
      for (const [rank, found] of Object.entries(blocks)) {
        const known = output.blocks.get(Number(rank)) ?? new Map();
        for (const [place, block] of Object.entries(found)) known.set(Number(place), block);
        output.blocks.set(Number(rank), known);
      }
      Object.assign(output, { ended, groups, states });
    }
    output.kept = kept;
    this.shown.forEach((one) => one.cell === cell && one.draw());
  }
}

class SwitchedOutput {
  constructor(place, cells) {
    this.place = place;
    this.cells = cells;
    this.cell = place.dataset.cell;
    this.inputs = CHOICES.map(([view]) =>
      element("input", {
        type: "radio",
        name: `${PLACE}-${this.cell}`,
        value: view,
        change: () => cells.choose(this.cell, view),
      }),
    );
    const labels = CHOICES.map(([, words, title], index) =>
      element("label", { title }, this.inputs[index], element("span", {}, words)),
    );
    this.note = element("span", { class: "ddp-note", role: "status" });
    this.choice = element(
      "div",
      { class: "ddp-views", role: "radiogroup", "aria-label": "view of the ranks' output" },
      ...labels,
    );
    this.pages = null;
    this.root = element(
      "div",
      { class: "ddp-output" },
      element("div", { class: "ddp-view-line" }, this.note, this.choice),
    );
    place.append(this.root);
    cells.shown.add(this);
    this.draw();
  }

  end() {
    this.cells.shown.delete(this);
    this.pages?.end();
    this.root.remove();
    delete this.place.dataset.shown;
  }

  draw() {
    const view = this.cells.model.get("views")[this.cell] ?? this.place.dataset.view;
    for (const input of this.inputs) input.checked = input.value === view;
    if (view !== MERGED) this.cells.ask(this.cell);
    const output = this.cells.outputs.get(this.cell);
    const loaded = Boolean(output?.kept && output.groups);
    const shown = view !== MERGED && loaded ? view : MERGED;
    this.choice.hidden = (this.cells.lost && !loaded) || output?.kept === false;
    setText(this.note, this.noteOn(view, output, loaded));
    this.place.dataset.shown = shown;
    if (this.pages && this.pages.view !== shown) {
      this.pages.end();
      this.pages = null;
    }
    if (shown === MERGED) return;
    if (!this.pages) {
      this.pages = new Pages(shown, this.cells.rendermime, output);
      this.root.append(this.pages.node);
    }
    this.pages.draw();
  }

  noteOn(view, output, loaded) {
    if (view === MERGED || loaded) return "";
    if (output.kept && !this.cells.lost) return "loading …";
    const why = this.cells.lost ? "the kernel has stopped" : "the kernel keeps that of the latest cells";
    return `The output by rank is no longer available: ${why}.`;
  }
}

// The element that a cell displays. The page makes it live wherever it is, and again when the notebook shows it again.
class OutputPlace extends HTMLElement {
  static kernels = new Map(); // token -> KernelCells

  connectedCallback() {
    this.begin();
  }

  disconnectedCallback() {
    this.output?.end();
    this.output = null;
  }

  begin() {
    const cells = OutputPlace.kernels.get(this.dataset.kernel);
    if (cells?.rendermime && !this.output) this.output = new SwitchedOutput(this, cells);
  }
}

export default {
  initialize({ model }) {
    if (!customElements.get(PLACE)) customElements.define(PLACE, OutputPlace);
    // Several kernels may have pages here; the first of them has defined the element.
    const { kernels } = /** @type {typeof OutputPlace} */ (customElements.get(PLACE));
    const cells = new KernelCells(model);
    const begin = () => {
      const token = model.get("token");
      if (!token) return; // the kernel does not listen yet
      kernels.set(token, cells);
      /** @type {NodeListOf<OutputPlace>} */
      const places = document.querySelectorAll(`${PLACE}[data-kernel="${token}"]`);
      for (const place of places) place.begin();
    };
    model.on("change:token", begin);
    begin();
    return () => {
      model.off("change:token", begin);
      kernels.delete(model.get("token"));
      cells.end();
    };
  },
};
