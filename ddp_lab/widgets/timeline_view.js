// The bucket timeline: a canvas that scrolls, zooms, answers the pointer and the keyboard.

import { AXIS_HEIGHT, GROUP_GAP, HEADER_HEIGHT, LABEL_WIDTH, RIGHT_MARGIN, extent, layOut } from "./layout.js";
import { bytes, element, makeFills, milliseconds, readTheme } from "./theme.js";
import { paint } from "./timeline_paint.js";

const HEIGHTS = [150, 460];
const ROW = 16;

export class TimelineView {
  // actions: {select(bucket), redraw(), say(text)}; describe(record, bucket) -> parameters of a bucket, or undefined
  constructor(root, actions, describe) {
    this.root = root;
    this.actions = actions;
    this.describe = describe;
    this.canvas = element("canvas", { role: "img", "aria-label": "bucket timeline" });
    this.spacer = element("div", { class: "ddp-spacer" }, this.canvas);
    this.scroller = element(
      "div",
      {
        class: "ddp-scroll",
        tabindex: "0",
        role: "application",
        "aria-label":
          "Bucket timeline. Up and down: bucket. Left and right: rank. Enter: details. Plus, minus, 0: zoom. Shift and left or right: pan.",
      },
      this.spacer,
    );
    this.tip = element("div", { class: "ddp-tip", role: "tooltip", hidden: true });
    this.node = element("div", { class: "ddp-timeline" }, this.scroller, this.tip);
    this.axis = "common";
    this.window = null;
    this.cursor = null;
    this.hover = null;
    this.automatic = 0;
    this.listen();
  }

  listen() {
    const on = (target, name, handler, options) => target.addEventListener(name, handler, options);
    on(this.scroller, "scroll", () => this.actions.redraw());
    on(this.scroller, "keydown", (event) => this.key(event));
    on(this.scroller, "blur", () => this.setCursor(null));
    on(this.canvas, "wheel", (event) => this.wheel(event), { passive: false });
    on(this.canvas, "pointerdown", (event) => this.press(event));
    on(this.canvas, "pointermove", (event) => this.move(event));
    on(this.canvas, "pointerup", (event) => this.release(event));
    on(this.canvas, "pointercancel", () => (this.drag = null));
    on(this.canvas, "pointerleave", () => this.leave());
    on(this.canvas, "dblclick", () => this.setWindow(null));
  }

  // Reads the sizes that `draw` needs.
  measure(record) {
    this.fitHeight(record);
    const { clientWidth, clientHeight, scrollTop } = this.scroller;
    return { width: Math.floor(clientWidth), height: clientHeight, scroll: scrollTop };
  }

  // Draws `record`; `selected` is the bucket whose details are open. A live axis keeps its length while steps differ little.
  draw(record, { width, height, scroll }, selected, live) {
    this.record = record;
    if (width < 40) return;
    this.layout = layOut(record, { width, height, axis: this.axis, window: this.window ?? this.steady(record, live) });
    const content = `${Math.max(this.layout.contentHeight + AXIS_HEIGHT, height)}px`;
    if (this.spacer.style.height !== content) this.spacer.style.height = content;
    const ratio = window.devicePixelRatio || 1;
    const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
    const pen = this.canvas.getContext("2d");
    if (this.canvas.width !== pixelWidth || this.canvas.height !== pixelHeight) {
      this.canvas.width = pixelWidth;
      this.canvas.height = pixelHeight;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    if (this.ratio !== ratio || !this.fills) [this.ratio, this.fills] = [ratio, makeFills(pen, ratio)];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { fills, axis, cursor } = this;
    this.theme ??= readTheme(this.root);
    paint(pen, record, this.layout, { width, height, scroll, theme: this.theme, fills, selected, cursor, axis });
    if (this.hover) this.showTip();
  }

  fitHeight(record) {
    const shape = `${record.rankCount} ${record.buckets}`;
    if (shape === this.shape) return;
    this.shape = shape;
    const wanted = record.rankCount * (HEADER_HEIGHT + GROUP_GAP + record.buckets * ROW) + AXIS_HEIGHT;
    this.scroller.style.height = `${Math.min(Math.max(wanted, HEIGHTS[0]), HEIGHTS[1])}px`;
    this.cursor = null;
  }

  steady(record, live) {
    const zero = new Float64Array(record.rankCount);
    if (this.axis === "rank") zero.forEach((_, row) => (zero[row] = record.bounds[row * 3] || 0));
    const [earliest, latest] = extent(record, zero);
    const needed = latest > 0 ? latest * 1.02 : 1;
    const shrinks = record.complete && needed < this.automatic * 0.6;
    if (!live || needed > this.automatic || shrinks) this.automatic = live ? needed * 1.1 : needed;
    return [Math.min(0, earliest), this.automatic];
  }

  setAxis(axis) {
    this.axis = axis;
    this.automatic = 0;
    this.setWindow(null);
  }

  setWindow(range) {
    this.window = range;
    this.node.classList.toggle("ddp-zoomed", range !== null);
    this.actions.redraw();
  }

  zoom(factor, at) {
    if (!this.layout) return;
    const [first, last] = this.layout.window;
    const middle = at ?? (first + last) / 2;
    const size = Math.min(Math.max((last - first) * factor, 1e-3), 1e6);
    const share = (middle - first) / (last - first);
    this.setWindow([middle - size * share, middle + size * (1 - share)]);
  }

  pan(milliseconds_) {
    const [first, last] = this.layout.window;
    this.setWindow([first + milliseconds_, last + milliseconds_]);
  }

  wheel(event) {
    const focused = document.activeElement === this.scroller || this.root.getRootNode().activeElement === this.scroller;
    if (!this.layout || !(event.ctrlKey || event.metaKey || (focused && !event.shiftKey))) return;
    event.preventDefault();
    this.zoom(Math.exp(Math.sign(event.deltaY) * 0.2), this.layout.scale.value(event.offsetX));
  }

  press(event) {
    this.scroller.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, window: this.layout?.window, moved: false };
  }

  move(event) {
    if (this.drag?.window) {
      const [first, last] = this.drag.window;
      const shift = ((this.drag.x - event.offsetX) / this.layout.scale.width) * (last - first);
      this.drag.moved ||= Math.abs(this.drag.x - event.offsetX) > 3;
      if (this.drag.moved) return this.setWindow([first + shift, last + shift]);
    }
    const found = this.find(event.offsetX, event.offsetY);
    this.hover = found && { ...found, x: event.offsetX, y: event.offsetY };
    this.canvas.style.cursor = found ? "pointer" : "default";
    this.showTip();
  }

  release(event) {
    const clicked = this.drag && !this.drag.moved;
    this.drag = null;
    const found = clicked && this.find(event.offsetX, event.offsetY);
    if (found) this.actions.select(found.bucket);
  }

  leave() {
    this.hover = null;
    this.showTip();
  }

  // The rank's row and the bucket under a point, also left of the plot where the labels are.
  find(x, y) {
    if (!this.layout || y > this.scroller.clientHeight - AXIS_HEIGHT || x > this.scroller.clientWidth - RIGHT_MARGIN) return null;
    const from = y + this.scroller.scrollTop;
    const row = Math.floor(from / this.layout.group);
    const bucket = Math.floor((from - row * this.layout.group - HEADER_HEIGHT) / this.layout.rowHeight);
    return row < this.record.rankCount && bucket >= 0 && bucket < this.record.buckets ? { row, bucket } : null;
  }

  showTip() {
    this.tip.hidden = !this.hover || Boolean(this.drag?.moved);
    if (this.tip.hidden) return;
    const lines = tipLines(this.record, this.hover.row, this.hover.bucket, this.describe(this.record, this.hover.bucket));
    this.tip.replaceChildren(
      element("strong", {}, lines[0]),
      ...lines.slice(1).map(([name, value]) => element("div", {}, element("span", {}, name), element("span", {}, value))),
    );
    const { clientWidth, clientHeight } = this.node;
    const left = this.hover.x + 16 + this.tip.offsetWidth > clientWidth ? this.hover.x - this.tip.offsetWidth - 12 : this.hover.x + 16;
    this.tip.style.left = `${Math.max(left, 0)}px`;
    this.tip.style.top = `${Math.max(Math.min(this.hover.y + 14, clientHeight - this.tip.offsetHeight), 0)}px`;
  }

  key(event) {
    if (!this.record || event.ctrlKey || event.metaKey || event.altKey) return;
    const [first, last] = this.layout?.window ?? [0, 1];
    const sideways = event.key === "ArrowLeft" ? -1 : 1;
    const actions = {
      ArrowUp: () => this.moveCursor(0, -1),
      ArrowDown: () => this.moveCursor(0, 1),
      ArrowLeft: () => (event.shiftKey ? this.pan((sideways * (last - first)) / 10) : this.moveCursor(sideways, 0)),
      Enter: () => this.cursor && this.actions.select(this.cursor.bucket),
      Escape: () => this.actions.select(null),
      "+": () => this.zoom(1 / 1.4),
      "-": () => this.zoom(1.4),
      0: () => this.setWindow(null),
    };
    actions.ArrowRight = actions.ArrowLeft;
    actions["="] = actions["+"];
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  moveCursor(rows, buckets) {
    const { rankCount, buckets: count } = this.record;
    const from = this.cursor ?? { row: rows < 0 ? 1 : 0, bucket: buckets > 0 ? -1 : buckets < 0 ? 1 : 0 };
    const flat = Math.min(Math.max(from.row * count + from.bucket + buckets, 0), rankCount * count - 1);
    const row = Math.min(Math.max(Math.floor(flat / count) + (this.cursor ? rows : 0), 0), rankCount - 1);
    this.setCursor({ row, bucket: flat % count });
    const lines = tipLines(this.record, row, flat % count, this.describe(this.record, flat % count));
    this.actions.say([lines[0], ...lines.slice(1).map((pair) => pair.join(" "))].join(", "));
  }

  setCursor(cursor) {
    this.cursor = cursor;
    if (cursor && this.layout) {
      const y = cursor.row * this.layout.group + HEADER_HEIGHT + cursor.bucket * this.layout.rowHeight;
      const plot = this.scroller.clientHeight - AXIS_HEIGHT;
      const top = this.scroller.scrollTop;
      if (y < top + HEADER_HEIGHT) this.scroller.scrollTop = y - HEADER_HEIGHT;
      else if (y + this.layout.rowHeight > top + plot) this.scroller.scrollTop = y + this.layout.rowHeight - plot;
    }
    this.actions.redraw();
  }
}

// What is known about one bucket on one rank: a title, then [name, value] pairs.
export function tipLines(record, row, bucket, info) {
  const index = row * record.buckets + bucket;
  const [first, ready, launched, reduced] = record.times.subarray(index * 4, index * 4 + 4);
  const begin = record.bounds[row * 3];
  const from = Number.isNaN(first) ? ready : first;
  const span = (value) => `${milliseconds(value)} ms`;
  const lines = [
    `step ${record.step} · rank ${record.ranks[row]} · bucket ${bucket}`,
    ["size", `${bytes(info?.bytes ?? record.bytes[bucket])}${info ? `, ${count(info.parameters.length, "parameter")}` : ""}`],
    ["first gradient ready at", span(from - begin)],
    ["filling", span(ready - from)],
    ["queued", span(launched - ready)],
  ];
  const last = record.lastRank[bucket];
  const late = last >= 0 && last !== record.ranks[row];
  lines.push([late ? `waiting for rank ${last}` : "waiting", span(record.wait[index])]);
  lines.push(["all-reduce", span(record.allReduce[bucket])]);
  lines.push(["reduced at", Number.isNaN(reduced) ? "not yet" : span(reduced - begin)]);
  lines.push(["hidden / exposed", `${milliseconds(record.hidden[index])} / ${span(record.exposed[index])}`]);
  if (record.device && !Number.isNaN(record.device[index * 2])) {
    lines.push(["on the device", span(record.device[index * 2 + 1] - record.device[index * 2])]);
  }
  return lines;
}

export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
