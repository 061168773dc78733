// The whole run as a strip: the time of every step since the start, and a brush that chooses the steps of the views.

import { sizeCanvas } from "../charts/canvas.js";
import { button, element, number, onKey, setText, Tip } from "../charts/dom.js";
import { milliseconds, readTheme } from "../charts/theme.js";
import { COLOURS } from "../generated.js";

const HEIGHT = 58;
const [TOP, BOTTOM] = [9, 6]; // of the plot: room for annotations above, for the analysed steps below
const MOST_MARKS = 60; // of a name: more of them are one for each step or so, and would hide the rest
const DRAG = 3; // pixels
const FEWEST = 10; // steps from which there is something to choose

const grouped = (value) => value.toLocaleString("en");

export class Strip {
  // actions: {between([first, last] | null): the reader chooses steps; pick(step, of so many); say(text)}
  constructor(actions) {
    this.actions = actions;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.tip = new Tip();
    const listeners = {
      pointerdown: (event) => this.press(event),
      pointermove: (event) => this.move(event),
      pointerup: (event) => this.release(event),
      pointercancel: () => this.drop(),
      pointerleave: () => this.tip.hide(),
      keydown: (event) => this.key(event),
    };
    this.plot = element(
      "div",
      { class: "ddp-strip-plot", tabindex: "0", role: "img", ...listeners },
      this.canvas,
      this.tip.node,
    );
    this.width = 0; // of the plot: asking the page makes it lay itself out at once
    new ResizeObserver(() => this.resized()).observe(this.plot);
    this.words = element("span", { class: "ddp-muted" });
    const typed = () => this.type();
    const keydown = (event) => event.key === "Enter" && typed(); // JupyterLab takes the key's own effect
    this.ends = ["first step shown", "last step shown"].map((label) =>
      number(label, "", { step: "1", change: typed, keydown }),
    );
    this.all = button("All steps", "Show the newest steps again (Escape)", () => this.actions.between(null));
    const fields = element("span", { class: "ddp-field" }, "steps ", this.ends[0], "–", this.ends[1], this.all);
    this.node = element(
      "section",
      { class: "ddp-strip", "aria-label": "all steps", hidden: true },
      this.plot,
      element("div", { class: "ddp-strip-line" }, this.words, fields),
    );
    this.drag = null; // the pixels between which the pointer moves
    this.found = this.state = null; // see draw
    this.theme = null; // read at the next picture
  }

  // found: of the kernel: a list for each column, see history.py, and the top of the scale; state: {between,
  // step: the one that is shown, marks: MarkStore, analysed: [first, last] or undefined}
  draw(found, state) {
    this.node.hidden = !(found?.first.length >= FEWEST);
    if (this.node.hidden) return;
    Object.assign(this, { found, state });
    const { first, last } = found;
    const limits = [first[0], last.at(-1)];
    const shown = state.between ?? limits;
    this.ends.forEach((input, index) => {
      [input.min, input.max] = limits;
      if (document.activeElement !== input) input.value = String(shown[index]);
    });
    this.all.disabled = !state.between;
    const joined = last[0] - first[0] + 1;
    const each =
      joined > 1 ? `; each point: about ${grouped(Math.round((limits[1] - limits[0] + 1) / first.length))} steps` : "";
    setText(
      this.words,
      state.between
        ? `Chosen: the views show steps ${grouped(shown[0])}–${grouped(shown[1])}.`
        : `Step time since the start${each}. Drag over it to choose steps.`,
    );
    this.plot.setAttribute(
      "aria-label",
      `Step time of steps ${grouped(limits[0])} to ${grouped(limits[1])}. Left and right: move the chosen ` +
        "steps. Escape: all steps.",
    );
    this.paint();
  }

  resized() {
    this.width = Math.floor(this.plot.clientWidth);
    this.paint();
  }

  // Paints only what has changed: most pictures of a training change no pixel here.
  paint() {
    const { width } = this;
    if (!this.found || width < 40) return;
    const { found, state } = this;
    this.theme ??= readTheme(this.plot);
    const text = JSON.stringify([
      width,
      found.last.at(-1),
      found.first.length,
      state.between,
      state.step,
      state.analysed,
      state.marks.count,
      this.drag,
      this.theme,
    ]);
    if (text === this.painted) return;
    this.painted = text;
    const pen = sizeCanvas(this.canvas, width, HEIGHT);
    pen.clearRect(0, 0, width, HEIGHT);
    const [from, to] = [found.first[0], found.last.at(-1) + 1];
    this.x = (step) => ((step - from) / (to - from)) * width;
    this.step = (x) => Math.min(Math.max(Math.round(from + (x / width) * (to - from)), from), to - 1);
    const { top } = found; // of the scale
    const y = (ms) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(ms / top, 1));
    this.paintTimes(pen, y);
    this.paintMarks(pen);
    this.paintChoice(pen, width);
    pen.fillStyle = this.theme.muted;
    pen.font = `10px ${this.theme.font}`;
    pen.textBaseline = "top";
    pen.fillText(`${milliseconds(top)} ms`, 3, 0);
  }

  paintTimes(pen, y) {
    const { first, last, low, median, high, exposed } = this.found;
    const area = (upper, lower, colour, strength) => {
      pen.beginPath();
      first.forEach((_, index) => pen.lineTo(this.middle(index), y(upper(index))));
      for (let index = last.length - 1; index >= 0; index--) pen.lineTo(this.middle(index), y(lower(index)));
      pen.globalAlpha = strength;
      pen.fillStyle = colour;
      pen.fill();
      pen.globalAlpha = 1;
    };
    area(
      (index) => high[index],
      (index) => low[index],
      this.theme.band,
      0.6,
    );
    area(
      (index) => exposed[index],
      () => 0,
      COLOURS.exposed,
      0.75,
    );
    pen.strokeStyle = this.theme.ink;
    pen.lineWidth = 1.3;
    pen.beginPath();
    median.forEach((value, index) => pen.lineTo(this.middle(index), y(value)));
    pen.stroke();
  }

  middle(index) {
    return this.x((this.found.first[index] + this.found.last[index] + 1) / 2);
  }

  // Annotations of the program and injected faults, above the times.
  paintMarks(pen) {
    const names = new Map();
    for (const { at, name, fault } of this.state.marks.all())
      names.set(name, [...(names.get(name) ?? []), { at, fault }].slice(-MOST_MARKS - 1));
    for (const marks of names.values()) {
      if (marks.length > MOST_MARKS) continue;
      for (const { at, fault } of marks) {
        pen.fillStyle = fault ? COLOURS.bad : this.theme.accent;
        pen.fillRect(this.x(this.stepAt(at)) - 1, 0, 2, TOP - 1);
      }
    }
  }

  // The step that was under way at a time in seconds.
  stepAt(seconds) {
    const { first, last, began } = this.found;
    const index = Math.max(
      began.findLastIndex((one) => one <= seconds),
      0,
    );
    const next = began[index + 1] ?? began[index];
    const share = next > began[index] ? Math.min((seconds - began[index]) / (next - began[index]), 1) : 0;
    return first[index] + share * (last[index] + 1 - first[index]);
  }

  paintChoice(pen, width) {
    const { between, step, analysed } = this.state;
    if (analysed) {
      pen.fillStyle = COLOURS.good;
      pen.fillRect(this.x(analysed[0]), HEIGHT - 4, Math.max(this.x(analysed[1] + 1) - this.x(analysed[0]), 2), 3);
    }
    pen.fillStyle = this.theme.accent;
    pen.fillRect(Math.min(this.x(step + 0.5), width - 2) - 0.75, TOP - 2, 1.5, HEIGHT - TOP);
    const pixels = this.drag ?? between?.map((one, index) => this.x(one + index));
    if (!pixels) return;
    const [from, to] = [Math.min(...pixels), Math.max(...pixels)];
    pen.globalAlpha = 0.22;
    pen.fillRect(from, 0, Math.max(to - from, 2), HEIGHT);
    pen.globalAlpha = 1;
    pen.fillRect(from, 0, 1, HEIGHT);
    pen.fillRect(Math.max(to - 1, from), 0, 1, HEIGHT);
  }

  place(event) {
    return event.clientX - this.canvas.getBoundingClientRect().left;
  }

  press(event) {
    if (event.button !== 0 || !this.x) return;
    const x = this.place(event);
    this.drag = [x, x];
    this.plot.setPointerCapture?.(event.pointerId);
  }

  move(event) {
    const x = this.place(event);
    if (this.drag) {
      this.drag = [this.drag[0], x];
      this.paint();
    }
    if (this.found) this.tip.show(this.lines(x), x, 0, this.plot);
  }

  release(event) {
    if (!this.drag) return;
    const [from, to] = this.drag;
    this.drop();
    if (Math.abs(to - from) < DRAG)
      return this.actions.pick(this.step(this.place(event)), this.found.last.at(-1) - this.found.first[0]);
    this.choose(this.step(Math.min(from, to)), this.step(Math.max(from, to)));
  }

  drop() {
    this.drag = null;
    this.paint();
  }

  lines(x) {
    const { first, last, low, median, high, exposed } = this.found;
    const at = this.step(x);
    const index = Math.max(
      last.findIndex((one) => one >= at),
      0,
    );
    const span = (value) => `${milliseconds(value)} ms`;
    const title =
      first[index] === last[index]
        ? `step ${grouped(first[index])}`
        : `steps ${grouped(first[index])}–${grouped(last[index])}`;
    const times =
      first[index] === last[index]
        ? [["step", span(median[index])]]
        : [
            ["step (median)", span(median[index])],
            ["shortest", span(low[index])],
            ["longest", span(high[index])],
          ];
    return [title, ...times, ["exposed communication", span(exposed[index])]];
  }

  choose(first, last) {
    this.actions.between([first, last]);
    this.actions.say(`The views show steps ${first} to ${last}.`);
  }

  type() {
    const [first, last] = this.ends.map((input) => Number(input.value));
    const [from, to] = [this.found.first[0], this.found.last.at(-1)];
    const cut = (value) => Math.min(Math.max(Math.round(value), from), to);
    if (Number.isFinite(first) && Number.isFinite(last))
      this.choose(cut(Math.min(first, last)), cut(Math.max(first, last)));
  }

  key(event) {
    const { between } = this.state;
    const [from, to] = [this.found.first[0], this.found.last.at(-1)];
    const [first, last] = between ?? [to - Math.floor((to - from) / 10), to];
    const by = (direction) => {
      const size = last - first + 1;
      const shift = between ? Math.min(Math.max(direction * size, from - first), to - last) : 0;
      this.choose(first + shift, last + shift);
    };
    onKey(event, { ArrowLeft: () => by(-1), ArrowRight: () => by(1), Escape: () => this.actions.between(null) });
  }
}
