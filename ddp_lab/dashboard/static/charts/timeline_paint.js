// Paints a layout on a canvas: no state, no events.

import { COLOURS, PARTS } from "../generated.js";
import { AXIS_HEIGHT, HEADER_HEIGHT, LABEL_WIDTH, PART, RIGHT_MARGIN } from "../steps/lanes.js";
import { outsideSpans } from "../steps/marks.js";
import { milliseconds } from "./theme.js";

const MIN_BAR = 0.8;
const LEAST_ROOM = 18; // pixels that the shortest text needs

// steps: [{record, shift, layout, bars}], the chosen one last; view: {width, height, scroll, theme, fills,
// selected: bucket | null, cursor: {row, bucket} | null, axis, brush: [x, x] | null, marks: MarkStore,
// over: steps lie over each other, first: the first step of several in a row | null}
export function paint(pen, steps, view) {
  const { width, height } = view;
  const plot = height - AXIS_HEIGHT;
  const { layout } = steps.at(-1);
  pen.clearRect(0, 0, width, height);
  pen.save();
  pen.beginPath();
  pen.rect(0, 0, width, plot);
  pen.clip();
  pen.translate(0, -view.scroll);
  const visible = (y, size) => y + size >= view.scroll && y <= view.scroll + plot;
  paintGrid(pen, layout, view, plot);
  steps.forEach((step, index) => {
    const last = index === steps.length - 1;
    if (view.over && !last) return;
    for (const band of step.layout.bands)
      if (visible(band.y, layout.group)) paintRank(pen, step.record, step.layout, band, view, last);
  });
  const strength = view.over ? Math.max(0.1, 1.6 / steps.length) : 1;
  for (const { record, layout: own, bars } of steps) {
    paintBars(pen, bars, view.fills, strength);
    if (!view.over) paintDevice(pen, record, own, view, visible);
  }
  if (!view.over) paintLetters(pen, steps.at(-1).bars, view.theme);
  paintMarkers(pen, layout, view);
  pen.restore();
  if (view.first !== null) paintStepNumbers(pen, steps, view, plot);
  paintAxis(pen, layout, view, plot);
  if (view.brush) paintBrush(pen, view, plot);
}

function paintBars(pen, bars, fills, strength) {
  PARTS.forEach((_, part) => {
    pen.fillStyle = fills[part];
    for (const bar of bars) {
      if (bar.part !== part) continue;
      pen.globalAlpha = (bar.open ? 0.55 : 1) * strength;
      pen.fillRect(bar.x, bar.y, Math.max(bar.width, MIN_BAR), bar.height);
    }
  });
  pen.globalAlpha = 1;
}

// When a bucket's collective ran on the device: a line along the upper edge of its row.
function paintDevice(pen, record, layout, view, visible) {
  if (!record.device) return;
  pen.fillStyle = view.theme.ink;
  const thick = Math.max(1, Math.min(3, layout.rowHeight / 5));
  for (const band of layout.bands) {
    for (let bucket = 0; bucket < record.buckets; bucket++) {
      const y = band.y + HEADER_HEIGHT + bucket * layout.rowHeight;
      const index = (band.row * record.buckets + bucket) * 2;
      const [begin, end] = [record.device[index], record.device[index + 1]].map((value) =>
        layout.scale.x(value - layout.zero[band.row]),
      );
      if (visible(y, layout.rowHeight) && end > begin) pen.fillRect(begin, y, Math.max(end - begin, 1), thick);
    }
  }
}

function paintBrush(pen, view, plot) {
  const [from, to] = view.brush;
  pen.fillStyle = view.theme.accent;
  pen.globalAlpha = 0.25;
  pen.fillRect(Math.min(from, to), 0, Math.abs(to - from), plot);
  pen.globalAlpha = 1;
}

function paintGrid(pen, layout, view, plot) {
  pen.strokeStyle = view.theme.grid;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const tick of layout.ticks) {
    const x = Math.round(tick.x) + 0.5;
    pen.moveTo(x, view.scroll);
    pen.lineTo(x, view.scroll + plot);
  }
  pen.stroke();
}

// The rank's header: its name, a band for its backward and a hollow one for finalize, what it did before, and marks;
// below, the buckets' numbers.
function paintRank(pen, record, layout, band, view, named) {
  const { theme } = view;
  paintOutside(pen, record, layout, band, view);
  const middle = band.y + HEADER_HEIGHT / 2 + 1;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.font = `600 12px ${theme.font}`;
  pen.fillStyle = theme.ink;
  if (named) pen.fillText(`rank ${record.ranks[band.row]}`, 4, middle);
  pen.fillStyle = theme.band;
  pen.fillRect(band.x, band.y + 3, Math.max(band.split - band.x, 0), HEADER_HEIGHT - 5);
  pen.strokeStyle = theme.band;
  pen.lineWidth = 1;
  if (band.end - band.split > 1) {
    pen.strokeRect(band.split + 0.5, band.y + 3.5, band.end - band.split - 1, HEADER_HEIGHT - 6);
  }
  pen.font = `10.5px ${theme.font}`;
  pen.fillStyle = theme.ink;
  const [begin, finalize, end] = [0, 1, 2].map((column) => record.bounds[band.row * 3 + column]);
  write(pen, `backward ${milliseconds(finalize - begin)} ms`, band.x + 4, middle, band.split - band.x - 6, "backward");
  write(
    pen,
    `finalize ${milliseconds(end - finalize)} ms`,
    band.split + 4,
    middle,
    band.end - band.split - 6,
    "finalize",
  );
  paintProgramMarks(pen, record, layout, band, view);
  if (named) paintFaults(pen, record, layout, band, view);
  if (!named) return;
  const every = Math.ceil(11 / layout.rowHeight);
  pen.font = `${Math.min(11, Math.max(9, layout.rowHeight - 4))}px ${theme.font}`;
  pen.textAlign = "right";
  for (let bucket = 0; bucket < record.buckets; bucket += every) {
    const y = band.y + HEADER_HEIGHT + (bucket + 0.5) * layout.rowHeight;
    const chosen = bucket === view.selected;
    pen.fillStyle = chosen ? theme.ink : theme.muted;
    pen.fillText(
      every === 1 && layout.rowHeight >= 12
        ? fitting(pen, view.nameOf?.(record, bucket) ?? `bucket ${bucket}`, LABEL_WIDTH - 10)
        : `${bucket}`,
      LABEL_WIDTH - 6,
      y,
    );
  }
}

// The end of a text that is too long says more than its begin: that of a module's name.
function fitting(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let from = 1;
  while (from < text.length && pen.measureText(`…${text.slice(from)}`).width > room) from++;
  return `…${text.slice(from)}`;
}

// The forward, and the time between the steps, named by the program's annotations.
function paintOutside(pen, record, layout, band, view) {
  const { theme } = view;
  const zero = layout.zero[band.row];
  pen.font = `10.5px ${theme.font}`;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  for (const { name, begin, end, kind } of outsideSpans(record, band.row, view.marks)) {
    const [x, right] = [layout.scale.x(begin - zero), layout.scale.x(end - zero)];
    if (right - x < 0.5) continue;
    pen.globalAlpha = kind === "forward" ? 0.45 : 0.3;
    pen.fillStyle = kind === "forward" ? COLOURS.forward : theme.band;
    pen.fillRect(x, band.y + 3, right - x, HEADER_HEIGHT - 5);
    pen.globalAlpha = 1;
    if (kind !== "forward") {
      pen.fillStyle = theme.muted;
      pen.fillRect(x, band.y + 3, 1, HEADER_HEIGHT - 5);
    }
    pen.fillStyle = theme.ink;
    write(pen, `${name} ${milliseconds(end - begin)} ms`, x + 4, band.y + HEADER_HEIGHT / 2 + 1, right - x - 6, name);
  }
}

// Marks inside the forward and the backward: a flag, with its name where there is room.
function paintProgramMarks(pen, record, layout, band, view) {
  const zero = layout.zero[band.row];
  const begin = record.outside[band.row * 3];
  const from = Number.isNaN(begin) ? record.bounds[band.row * 3] : begin;
  const marks = view.marks.of(record, band.row, from, record.bounds[band.row * 3 + 2]);
  pen.font = `600 10px ${view.theme.font}`;
  marks.forEach(({ at, name }, index) => {
    const x = layout.scale.x(at - zero);
    const next =
      index + 1 < marks.length ? layout.scale.x(marks[index + 1].at - zero) : view.first === null ? Infinity : band.end;
    const wide = pen.measureText(name).width + 6;
    pen.fillStyle = view.theme.ink;
    pen.fillRect(x, band.y + 1, 1, layout.group - 2);
    if (x + wide > next) return pen.fillRect(x, band.y + 1, 4, 4);
    pen.fillRect(x, band.y + 1, wide, 12);
    pen.fillStyle = view.theme.paper;
    pen.fillText(name, x + 3, band.y + 7.5);
  });
}

// Injected faults: a stripe beside the rank, and their kind; details are in the tooltip.
function paintFaults(pen, record, layout, band, view) {
  const names = view.marks.faultsIn(record, band.row);
  if (!names.length) return;
  pen.fillStyle = COLOURS.bad;
  pen.fillRect(0, band.y, 3, layout.group - 2);
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.font = `600 10.5px ${view.theme.font}`;
  const text = `⚠ ${names.length > 1 ? `${names.length} faults` : names[0].split(/:| of /)[0]}`;
  const right = view.width - RIGHT_MARGIN;
  const wide = Math.min(pen.measureText(text).width + 10, right - LABEL_WIDTH);
  pen.fillRect(right - wide, band.y + 2, wide, HEADER_HEIGHT - 3);
  pen.fillStyle = "#000";
  pen.fillText(text, right - 5, band.y + HEADER_HEIGHT / 2 + 1, wide - 8);
  pen.textAlign = "left";
}

// Where each of several steps in a row begins, and its number.
function paintStepNumbers(pen, steps, view, plot) {
  pen.font = `11px ${view.theme.font}`;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  let free = 0;
  for (const { record, layout, shift } of steps) {
    const x = Math.round(layout.scale.x(shift));
    if (x < free || x > view.width - RIGHT_MARGIN - 30) continue;
    const text = `step ${record.step}`;
    const wide = pen.measureText(text).width;
    pen.fillStyle = view.theme.muted;
    pen.fillRect(x, 0, 1, plot);
    pen.fillStyle = view.theme.paper;
    pen.fillRect(x + 1, plot - 14, wide + 4, 13);
    pen.fillStyle = view.theme.muted;
    pen.fillText(text, x + 3, plot - 7);
    free = x + wide + 8;
  }
}

// Writes the text if it fits, else the shorter one, else nothing.
function write(pen, text, x, y, room, shorter) {
  if (room < LEAST_ROOM) return; // measuring costs more than drawing
  for (const one of [text, shorter]) {
    if (pen.measureText(one).width <= room) return pen.fillText(one, x, y);
  }
}

function paintLetters(pen, bars, theme) {
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = `700 10px ${theme.font}`;
  for (const bar of bars) {
    if (bar.part !== PART.WAITING || bar.width < 16 || bar.height < 9) continue;
    const x = bar.x + bar.width / 2;
    pen.fillStyle = PARTS[PART.WAITING].colour;
    pen.fillRect(x - 6, bar.y + 1, 12, bar.height - 2);
    pen.fillStyle = "#000";
    pen.fillText("w", x, bar.y + bar.height / 2);
  }
}

// The selected bucket on every rank, and the keyboard's cursor.
function paintMarkers(pen, layout, view) {
  const right = view.width - RIGHT_MARGIN;
  const outline = (row, bucket) => {
    const y = layout.bands[row].y + HEADER_HEIGHT + bucket * layout.rowHeight;
    pen.strokeRect(LABEL_WIDTH - 1.5, y - 1, right - LABEL_WIDTH + 3, layout.rowHeight + 1);
  };
  if (view.selected !== null) {
    pen.strokeStyle = view.theme.ink;
    pen.lineWidth = 1;
    layout.bands.forEach((band) => outline(band.row, view.selected));
  }
  if (view.cursor && layout.bands[view.cursor.row]) {
    pen.strokeStyle = view.theme.accent;
    pen.lineWidth = 2;
    outline(view.cursor.row, view.cursor.bucket);
  }
}

function paintAxis(pen, layout, view, plot) {
  const { theme, width } = view;
  pen.strokeStyle = theme.muted;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(LABEL_WIDTH, plot + 0.5);
  pen.lineTo(width - RIGHT_MARGIN, plot + 0.5);
  pen.fillStyle = theme.muted;
  pen.font = `11px ${theme.font}`;
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (const tick of layout.ticks) {
    pen.moveTo(Math.round(tick.x) + 0.5, plot);
    pen.lineTo(Math.round(tick.x) + 0.5, plot + 4);
    pen.fillText(tick.label, tick.x, plot + 15);
  }
  pen.stroke();
  const of = view.axis === "rank" ? "each rank's own backward" : "the first rank's backward";
  const step = view.first === null ? "" : ` of step ${view.first}`;
  const room = width - RIGHT_MARGIN - LABEL_WIDTH;
  write(pen, `ms since ${of}${step} began`, LABEL_WIDTH + room / 2, plot + 29, room, "ms since backward began");
}
