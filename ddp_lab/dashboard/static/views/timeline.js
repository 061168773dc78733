// The bucket timeline: a canvas that scrolls and zooms, of one step or several.

import { sizeCanvas } from "../charts/canvas.js";
import { element, Tip } from "../charts/dom.js";
import { bytes, count, makeFills, milliseconds, readTheme } from "../charts/theme.js";
import { paint } from "../charts/timeline_paint.js";
import { TimelinePointer } from "../charts/timeline_pointer.js";
import { PARTS } from "../generated.js";
import { AXIS_HEIGHT, EDGES, extent, GROUP_GAP, HEADER_HEIGHT, layOut, waitOf } from "../steps/lanes.js";
import { chooseSteps, joinNarrow } from "../steps/many_steps.js";
import { outsideSpans, wholeBegin } from "../steps/marks.js";

const HEIGHTS = [150, 460];
const ROW = 16;
const [FILLING, QUEUED, WAITING] = PARTS.map((one) => one.label);

export class TimelineView {
  // actions: {select(bucket), step(by), redraw(), say(text)}; facts: {bucket(record, bucket) -> its description, or
  // undefined; words(record): of KernelFacts}
  constructor(root, actions, facts, marks) {
    this.root = root;
    this.actions = actions;
    this.facts = facts;
    this.marks = marks;
    this.canvas = element("canvas", { role: "img", "aria-label": "timeline" });
    this.spacer = element("div", { class: "ddp-spacer" }, this.canvas);
    this.room = null; // the size of the scrolled part, read once: reading it costs a layout of the page
    this.ratio = 0; // of pixels, for which the fills are made
    this.fills = null;
    this.scroller = element(
      "div",
      {
        class: "ddp-scroll",
        tabindex: "0",
        role: "application",
        "aria-label":
          "Timeline. Up and down: bucket or parameter group. Left and right: rank. Enter: details. Page up " +
          "and down: step. Plus, minus, 0: zoom. Shift and left or right: pan.",
      },
      this.spacer,
    );
    new ResizeObserver(() => this.resized()).observe(this.scroller);
    this.tip = new Tip();
    this.node = element("div", { class: "ddp-timeline" }, this.scroller, this.tip.node);
    this.scroll = 0;
    this.scroller.addEventListener("scroll", () => (this.scroll = this.scroller.scrollTop));
    this.axis = "common";
    this.mode = "one"; // of many_steps.js
    this.whole = false; // from the end of the previous step, not from the backward's begin
    this.window = null;
    this.brush = null; // the pixels between which time is being chosen
    this.cursor = null;
    this.automatic = 0;
    this.pointer = new TimelinePointer(this, (record, row, bucket) => [
      ...(bucket < 0 ? headerLines(record, row, marks) : tipLines(record, row, bucket, facts)),
      ...marks.faultsIn(record, row).map((name) => ["injected fault", name]),
    ]);
  }

  // Reads the sizes that `draw` needs.
  measure(record) {
    this.fitHeight(record);
    this.room ??= { width: Math.floor(this.scroller.clientWidth), height: this.scroller.clientHeight };
    return { ...this.room, scroll: this.scroll };
  }

  forgetTheme() {
    this.theme = this.room = null;
  }

  resized() {
    this.room = null;
    this.scroll = this.scroller.scrollTop;
    this.actions.redraw();
  }

  // Draws `record`, and those of the `records()` before it that the mode shows; `selected` is the bucket whose details
  // are open. Returns whether there was room: while JupyterLab changes its theme the width may be 0 for a moment.
  draw(record, records, { width, height, scroll }, selected, live) {
    this.record = record;
    if (width < 40) {
      this.room = null; // no observer says when a theme's change ends within a frame
      return false;
    }
    this.steps = chooseSteps(records, record, this.mode);
    const range = this.window ?? this.automaticWindow(record, live);
    const visible = [scroll, scroll + height - AXIS_HEIGHT];
    this.layouts = this.steps.map(({ record: one, shift }) =>
      layOut(one, { width, height, axis: this.axis, window: range, shift, visible }),
    );
    this.layout = this.layouts.at(-1);
    const content = `${Math.max(this.layout.contentHeight + AXIS_HEIGHT, height)}px`;
    if (this.spacer.style.height !== content) this.spacer.style.height = content;
    const pen = sizeCanvas(this.canvas, width, height);
    const ratio = window.devicePixelRatio || 1;
    if (this.ratio !== ratio) this.fills = makeFills(pen, ratio);
    this.ratio = ratio;
    this.theme ??= readTheme(this.root);
    const { fills, axis, cursor, brush, marks, theme, facts } = this;
    const drawn = this.steps.map(({ record: one, shift }, index) => ({
      record: one,
      shift,
      layout: this.layouts[index],
      bars: joinNarrow(this.layouts[index].bars),
    }));
    const over = this.mode.startsWith("over") && drawn.length > 1;
    paint(pen, drawn, {
      width,
      height,
      scroll,
      theme,
      fills,
      selected,
      cursor,
      axis,
      brush,
      marks,
      over,
      nameOf: (one, bucket) => facts.words(one).name(bucket),
      first: drawn.length > 1 && !over ? drawn[0].record.step : null,
    });
    this.pointer.showTip();
    return true;
  }

  automaticWindow(record, live) {
    const [first] = this.steps;
    const begin = this.whole ? wholeBegin(first.record) : 0;
    const [earliest, steady] = this.steady(record, live && this.steps.length === 1);
    const ends = this.steps.map(
      ({ record: one, shift }) => shift + Math.max(0, ...one.bounds.filter((value) => !Number.isNaN(value))) * 1.02,
    );
    return [Math.min(earliest, begin), Math.max(steady + this.steps.at(-1).shift, ...ends)];
  }

  // The step drawn at a pixel: the last one that begins before it.
  recordAt(x) {
    if (!this.mode.startsWith("row") || !this.layout) return this.record;
    const at = this.layout.scale.value(x);
    return (this.steps.findLast(({ shift }) => shift <= at) ?? this.steps[0]).record;
  }

  fitHeight(record) {
    const shape = `${record.rankCount} ${record.buckets}`;
    if (shape === this.shape) return;
    this.shape = shape;
    const wanted = record.rankCount * (HEADER_HEIGHT + GROUP_GAP + record.buckets * ROW) + AXIS_HEIGHT;
    this.room = null;
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

  setMode(mode) {
    this.mode = mode;
    this.automatic = 0;
    this.setWindow(null);
  }

  setWhole(whole) {
    this.whole = whole;
    this.setWindow(null);
  }

  setBrush(brush) {
    this.brush = brush;
    this.actions.redraw();
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

// The tooltip of a rank's header: its phases in a step, in order.
export function headerLines(record, row, marks) {
  const [begin, finalize, end] = record.bounds.subarray(row * 3, row * 3 + 3);
  const spans = outsideSpans(record, row, marks).map((one) => [one.name, `${milliseconds(one.end - one.begin)} ms`]);
  const from = Number.isNaN(record.outside[row * 3]) ? begin : record.outside[row * 3];
  const inside = marks
    .of(record, row, from, end)
    .map(({ at, name }) => [`annotation ${name} at`, `${milliseconds(at - begin)} ms`]);
  const exposed = ["exposed communication", `${milliseconds(record.busy[row * 2 + 1])} ms`];
  return [
    `step ${record.step} · rank ${record.ranks[row]}`,
    ...spans,
    ["backward", `${milliseconds(finalize - begin)} ms`],
    ["finalize", `${milliseconds(end - finalize)} ms`],
    exposed,
    ...inside.slice(0, 8),
  ];
}

// The tooltip of one bucket on one rank: a title, then [name, value] pairs.
export function tipLines(record, row, bucket, facts) {
  const info = facts.bucket(record, bucket);
  const words = facts.words(record);
  const index = row * record.buckets + bucket;
  const [from, ready, launched, , reduced] = record.edges.subarray(index * EDGES, (index + 1) * EDGES);
  const begin = record.bounds[row * 3];
  const span = (value) => `${milliseconds(value)} ms`;
  const lines = [
    `step ${record.step} · rank ${record.ranks[row]} · ${words.name(bucket)}`,
    [
      "size",
      `${bytes(info?.bytes ?? record.bytes[bucket])}${info ? `, ${count(info.parameters.length, "parameter")}` : ""}`,
    ],
    ...(words.gradients
      ? [
          ["first gradient ready at", span(from - begin)],
          [FILLING, span(ready - from)],
        ]
      : []),
    [QUEUED, span(launched - ready)],
  ];
  const last = record.lastRank[bucket];
  const late = last >= 0 && last !== record.ranks[row];
  lines.push([late ? `${WAITING} (last: rank ${last})` : WAITING, span(waitOf(record, row, bucket))]);
  lines.push([words.reduction, span(record.allReduce[bucket])]);
  lines.push(["reduced at", Number.isNaN(reduced) ? "not yet" : span(reduced - begin)]);
  lines.push(["overlapped / exposed", `${milliseconds(record.hidden[index])} / ${span(record.exposed[index])}`]);
  if (record.device && !Number.isNaN(record.device[index * 2])) {
    lines.push(["on the device", span(record.device[index * 2 + 1] - record.device[index * 2])]);
  }
  return lines;
}
