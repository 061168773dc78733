// The layout of a step's timeline: the bars of timeline_scene.py, in pixels.

import { EDGE_NAMES, PARTS } from "../generated.js";

export const LABEL_WIDTH = 76;
export const RIGHT_MARGIN = 14;
export const AXIS_HEIGHT = 34;
export const HEADER_HEIGHT = 18;
export const GROUP_GAP = 6;
export const ROW_HEIGHTS = [3, 20];
const TICK_SPACING = 84;

const numbered = (names) => Object.fromEntries(names.map((name, index) => [name.toUpperCase(), index]));
export const PART = numbered(PARTS.map((one) => one.name));
// The edges of the parts: each of the first four parts is between two neighbouring edges.
export const EDGE = numbered(EDGE_NAMES);
export const EDGES = EDGE_NAMES.length;

const or = (value, otherwise) => (Number.isNaN(value) ? otherwise : value);

export function makeScale(window, width) {
  const [first, last] = window;
  return {
    window,
    width,
    x: (value) => LABEL_WIDTH + Math.min(Math.max((value - first) / (last - first), 0), 1) * width,
    value: (x) => first + ((x - LABEL_WIDTH) / width) * (last - first),
  };
}

// size: {width, height, axis: "common" | "rank", window: [ms, ms] | null}; and for a picture of several steps or of a
// part of the content: shift (ms added to every time), visible: [first, last] pixel of the content
export function layOut(record, size) {
  const ranks = record.rankCount;
  const buckets = record.buckets;
  const zero = new Float64Array(ranks);
  for (let row = 0; row < ranks; row++)
    zero[row] = (size.axis === "rank" ? or(record.bounds[row * 3], 0) : 0) - (size.shift ?? 0);
  const [earliest, latest] = extent(record, zero);
  const window = size.window ?? [Math.min(0, earliest), latest > 0 ? latest * 1.02 : 1];
  const scale = makeScale(window, size.width - LABEL_WIDTH - RIGHT_MARGIN);
  const room = size.height - AXIS_HEIGHT - ranks * (HEADER_HEIGHT + GROUP_GAP);
  const fitting = Math.floor(room / Math.max(ranks * buckets, 1));
  const rowHeight = Math.min(Math.max(fitting, ROW_HEIGHTS[0]), ROW_HEIGHTS[1]);
  const group = HEADER_HEIGHT + buckets * rowHeight + GROUP_GAP;
  const bars = [];
  const bands = [];
  for (let row = 0; row < ranks; row++) {
    const top = row * group;
    bands.push(band(record, row, top, zero[row], latest, scale));
    for (let bucket = 0; bucket < buckets; bucket++) {
      const y = top + HEADER_HEIGHT + bucket * rowHeight;
      if (size.visible && (y + rowHeight < size.visible[0] || y > size.visible[1])) continue;
      addBars(bars, spans(record, row, bucket, zero[row], latest), scale, row, bucket, y, rowHeight);
    }
  }
  return {
    bars,
    bands,
    ticks: ticks(window, scale.width),
    rowHeight,
    group,
    contentHeight: ranks * group,
    window,
    scale,
    zero,
  };
}

export function ticks(window, width) {
  const [first, last] = window;
  const wanted = ((last - first) * TICK_SPACING) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= wanted * 0.999999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const scale = makeScale(window, width);
  const found = [];
  for (let mark = Math.ceil(first / step - 1e-9); mark <= Math.floor(last / step + 1e-9); mark++) {
    found.push({ x: scale.x(mark * step), label: (mark * step).toFixed(digits) });
  }
  return found;
}

// [part, begin, end, open] of one bucket on one rank, in milliseconds of the axis; open parts end at `latest`.
export function spans(record, row, bucket, zero, latest) {
  const at = (row * record.buckets + bucket) * EDGES;
  const found = [];
  for (const part of Object.values(PART)) {
    const [first, last] = part === PART.EXPOSED ? [EDGE.EXPOSED_FROM, EDGE.REDUCED] : [part, part + 1];
    const [begin, end] = [record.edges[at + first] - zero, record.edges[at + last] - zero];
    if (or(end, latest) > begin || (part < PART.WAITING && !Number.isNaN(begin)))
      found.push([part, begin, or(end, latest), Number.isNaN(end)]);
  }
  return found;
}

function addBars(bars, found, scale, row, bucket, y, rowHeight) {
  const gap = rowHeight >= 5 ? 1 : 0;
  const line = Math.max(1, Math.floor(rowHeight / 5));
  for (const [part, begin, end, open] of found) {
    if (end < scale.window[0] || begin > scale.window[1]) continue;
    const x = scale.x(begin);
    const width = scale.x(end) - x;
    if (part === PART.EXPOSED)
      bars.push({ part, row, bucket, x, y: y + rowHeight - gap - line, width, height: line, open });
    else bars.push({ part, row, bucket, x, y, width, height: rowHeight - gap, open });
  }
}

function band(record, row, y, zero, latest, scale) {
  const [begun, finalized, ended] = [0, 1, 2].map((column) => record.bounds[row * 3 + column] - zero);
  const x = scale.x(or(begun, 0));
  if (Number.isNaN(begun)) return { row, y, x, split: x, end: x };
  return { row, y, x, split: scale.x(or(finalized, or(ended, latest))), end: scale.x(or(ended, latest)) };
}

// Time of the first bucket event (at most) and of the last event of all, in milliseconds of the axis.
export function extent(record, zero) {
  const of = (column) =>
    record.ranks.map((_, row) => record.extent[row * 2 + column] - zero[row]).filter((value) => !Number.isNaN(value));
  const [first, last] = [of(0), of(1)];
  return [first.length ? Math.min(...first) : 0, last.length ? Math.max(...last) : 0];
}

// How long a rank's collective waited for the last rank's; NaN while a rank has not launched.
export function waitOf(record, row, bucket) {
  const at = (row * record.buckets + bucket) * EDGES;
  return record.lastRank[bucket] < 0 ? NaN : record.edges[at + EDGE.ALL_LAUNCHED] - record.edges[at + EDGE.LAUNCHED];
}
