// A canvas as wide as its container, whose regions respond to the pointer and the keyboard.

import { element, onKey, spoken, Tip } from "./dom.js";
import { readTheme } from "./theme.js";

// Sets the size of the canvas and returns a context that draws in CSS pixels.
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

export class ChartCanvas {
  // actions: {redraw(), say(text)}
  constructor(label, actions) {
    this.actions = actions;
    this.canvas = element("canvas", { role: "img", "aria-label": label });
    this.tip = new Tip();
    const keys = `${label}. Arrow keys: move from value to value. Enter: choose. Escape: leave.`;
    const listeners = {
      pointermove: (event) => this.move(event),
      pointerleave: () => this.leave(),
      click: (event) => this.find(this.place(event))?.act?.(),
      keydown: (event) => this.key(event),
      blur: () => this.setCursor(null),
    };
    this.node = element(
      "div",
      { class: "ddp-chart", tabindex: "0", role: "application", "aria-label": keys, ...listeners },
      this.canvas,
      this.tip.node,
    );
    this.regions = [];
    this.cursor = null; // key of the region that the keyboard is at
    this.theme = null; // read at the next picture
  }

  // The label for screen readers.
  label(text) {
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  // Whether it is visible: not while its tab is closed.
  get hasRoom() {
    return this.node.clientWidth >= 40;
  }

  // Empties the canvas; null while it has no room.
  begin(height) {
    if (!this.hasRoom) return null;
    const width = Math.floor(this.node.clientWidth);
    const pen = sizeCanvas(this.canvas, width, height);
    pen.clearRect(0, 0, width, height);
    this.theme ??= readTheme(this.node);
    pen.textBaseline = "middle";
    return { pen, width, height, theme: this.theme };
  }

  // regions: [{key, x, y, width, height, lines(): [title, [name, value], ...], act?()}], in reading order; last wins
  finish(regions) {
    this.regions = regions;
    const found = regions.find((one) => one.key === this.cursor);
    if (found) {
      const pen = this.canvas.getContext("2d");
      pen.strokeStyle = this.theme.accent;
      pen.lineWidth = 2;
      pen.strokeRect(found.x - 1, found.y - 1, found.width + 2, found.height + 2);
    }
    if (this.pointer) this.showTip();
  }

  find({ x, y }) {
    const inside = (one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height;
    return this.regions.findLast(inside) ?? null;
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  move(event) {
    this.pointer = this.place(event);
    this.showTip();
  }

  leave() {
    this.pointer = null;
    this.tip.hide();
  }

  showTip() {
    const { x, y } = this.pointer;
    const found = this.find(this.pointer);
    this.canvas.style.cursor = found?.act ? "pointer" : "default";
    if (found) this.tip.show(found.lines(), x, y, this.node);
    else this.tip.hide();
  }

  key(event) {
    if (!this.regions.length) return;
    const index = this.regions.findIndex((one) => one.key === this.cursor);
    const here = this.regions[index];
    onKey(event, {
      ArrowLeft: () => this.go(this.regions[Math.max(index - 1, 0)]),
      ArrowRight: () => this.go(this.regions[Math.min(index + 1, this.regions.length - 1)]),
      ArrowUp: () => this.go(here ? this.vertical(here, -1) : this.regions[0]),
      ArrowDown: () => this.go(here ? this.vertical(here, 1) : this.regions[0]),
      Home: () => this.go(this.regions[0]),
      End: () => this.go(this.regions.at(-1)),
      Enter: () => here?.act?.(),
      Escape: () => this.setCursor(null),
    });
  }

  // The region above or below whose middle is nearest.
  vertical(here, direction) {
    const beyond = this.regions.filter((one) => (one.y - here.y) * direction > 0.5);
    const rows = beyond.map((one) => one.y * direction);
    const next = Math.min(...rows) * direction;
    const middle = here.x + here.width / 2;
    const distance = (one) => Math.abs(one.x + one.width / 2 - middle);
    const inRow = beyond.filter((one) => Math.abs(one.y - next) < 0.5);
    return inRow.reduce((best, one) => (distance(one) < distance(best) ? one : best), inRow[0]) ?? here;
  }

  go(region) {
    this.setCursor(region.key);
    this.actions.say(spoken(region.lines()));
  }

  setCursor(key) {
    this.cursor = key;
    this.actions.redraw();
  }
}

export function median(values) {
  const known = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  if (!known.length) return NaN;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
}
