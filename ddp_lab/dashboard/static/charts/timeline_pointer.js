// Pointer and keyboard on the bucket timeline: a drag pans, a drag on the axis (or with Shift) selects a time range,
// the wheel zooms, a click opens a bucket.

import { AXIS_HEIGHT, HEADER_HEIGHT, RIGHT_MARGIN } from "../steps/lanes.js";
import { onKey, spoken } from "./dom.js";

const CLICK = 3; // pixels that a click may move

export class TimelinePointer {
  // view: TimelineView; tipLines(record, row, bucket): what is there, bucket -1: the rank's header
  constructor(view, tipLines) {
    this.view = view;
    this.tipLines = tipLines;
    const on = (target, name, handler, options) => target.addEventListener(name, handler, options);
    on(view.scroller, "scroll", () => view.actions.redraw());
    on(view.scroller, "keydown", (event) => this.key(event));
    on(view.scroller, "blur", () => view.setCursor(null));
    on(view.canvas, "wheel", (event) => this.wheel(event), { passive: false });
    on(view.canvas, "pointerdown", (event) => this.press(event));
    on(view.canvas, "pointermove", (event) => this.move(event));
    on(view.canvas, "pointerup", (event) => this.release(event));
    on(view.canvas, "pointercancel", () => this.cancel());
    on(view.canvas, "pointerleave", () => this.leave());
    on(view.canvas, "dblclick", () => view.setWindow(null));
  }

  wheel(event) {
    const { view } = this;
    const focused = document.activeElement === view.scroller || view.root.getRootNode().activeElement === view.scroller;
    if (!view.layout || !(event.ctrlKey || event.metaKey || (focused && !event.shiftKey))) return;
    event.preventDefault();
    view.zoom(Math.exp(Math.sign(event.deltaY) * 0.2), view.layout.scale.value(event.offsetX));
  }

  onAxis(event) {
    return event.offsetY > this.view.scroller.clientHeight - AXIS_HEIGHT;
  }

  press(event) {
    const { view } = this;
    view.scroller.focus({ preventScroll: true });
    view.canvas.setPointerCapture(event.pointerId);
    this.drag = {
      x: event.offsetX,
      window: view.layout?.window,
      moved: false,
      brush: event.shiftKey || this.onAxis(event),
    };
  }

  move(event) {
    const { view, drag } = this;
    if (drag?.window) {
      drag.moved ||= Math.abs(drag.x - event.offsetX) > CLICK;
      if (drag.moved && drag.brush) return view.setBrush([drag.x, event.offsetX]);
      const [first, last] = drag.window;
      const shift = ((drag.x - event.offsetX) / view.layout.scale.width) * (last - first);
      if (drag.moved) return view.setWindow([first + shift, last + shift]);
    }
    const found = this.find(event.offsetX, event.offsetY);
    this.hover = found && { ...found, x: event.offsetX, y: event.offsetY };
    view.canvas.style.cursor = this.onAxis(event) ? "col-resize" : found?.bucket >= 0 ? "pointer" : "default";
    this.showTip();
  }

  release(event) {
    const { drag, view } = this;
    this.drag = null;
    if (drag?.brush && drag.moved) {
      const ends = [drag.x, event.offsetX].map(view.layout.scale.value).sort((a, b) => a - b);
      view.setBrush(null);
      return view.setWindow(ends);
    }
    const found = drag && !drag.moved && this.find(event.offsetX, event.offsetY);
    if (found && found.bucket >= 0) view.actions.select(found.bucket);
  }

  cancel() {
    this.drag = null;
    this.view.setBrush(null);
  }

  leave() {
    this.hover = null;
    this.showTip();
  }

  // The rank's row and the bucket (-1: its header) under a point, also left of the plot where the labels are.
  find(x, y) {
    const { view } = this;
    const { layout, record, scroller } = view;
    if (!layout || y > scroller.clientHeight - AXIS_HEIGHT || x > scroller.clientWidth - RIGHT_MARGIN) return null;
    const from = y + scroller.scrollTop;
    const row = Math.floor(from / layout.group);
    const bucket = Math.floor((from - row * layout.group - HEADER_HEIGHT) / layout.rowHeight);
    return row < record.rankCount && bucket >= -1 && bucket < record.buckets ? { row, bucket } : null;
  }

  showTip() {
    const { view, hover } = this;
    if (!hover || this.drag?.moved) return view.tip.hide();
    const record = view.recordAt(hover.x);
    view.tip.show(this.tipLines(record, hover.row, hover.bucket), hover.x, hover.y, view.node);
  }

  key(event) {
    const { view } = this;
    if (!view.record) return;
    const [first, last] = view.layout?.window ?? [0, 1];
    const sideways = event.key === "ArrowLeft" ? -1 : 1;
    const across = () => (event.shiftKey ? view.pan((sideways * (last - first)) / 10) : this.moveCursor(sideways, 0));
    onKey(event, {
      ArrowUp: () => this.moveCursor(0, -1),
      ArrowDown: () => this.moveCursor(0, 1),
      ArrowLeft: across,
      ArrowRight: across,
      Enter: () => view.cursor && view.actions.select(view.cursor.bucket),
      Escape: () => (this.drag ? this.cancel() : view.actions.select(null)),
      PageUp: () => view.actions.step(-1),
      PageDown: () => view.actions.step(1),
      "+": () => view.zoom(1 / 1.4),
      "-": () => view.zoom(1.4),
      "=": () => view.zoom(1 / 1.4),
      0: () => view.setWindow(null),
    });
  }

  moveCursor(rows, buckets) {
    const { view } = this;
    const { rankCount, buckets: count } = view.record;
    const from = view.cursor ?? { row: rows < 0 ? 1 : 0, bucket: buckets > 0 ? -1 : buckets < 0 ? 1 : 0 };
    const flat = Math.min(Math.max(from.row * count + from.bucket + buckets, 0), rankCount * count - 1);
    const row = Math.min(Math.max(Math.floor(flat / count) + (view.cursor ? rows : 0), 0), rankCount - 1);
    view.setCursor({ row, bucket: flat % count });
    view.actions.say(spoken(this.tipLines(view.record, row, flat % count)));
  }
}
