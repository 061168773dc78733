// The reducer of each rank as a state machine: its buckets in pending, ready, launched, reduced; where it pauses; which
// rank waits for which.

import { COLOURS } from "../generated.js";
import { paintTiles } from "./scene.js";
import { bucketColour } from "./theme.js";

export const STATES = ["pending", "ready", "launched", "reduced"];
const GATES = ["its last gradient is ready", "all buckets before it are launched", "all ranks have launched it"];
const HEAD = 40;
const TITLE = 22;
const PAD = 6;
const ARROWS = 54;

// Sizes of the tiles so that they fit into a column; buckets: at most so many of one rank.
function tileSize(buckets, column) {
  for (const [width, height] of [
    [48, 22],
    [30, 20],
    [22, 18],
    [12, 12],
    [7, 9],
  ]) {
    const across = Math.max(1, Math.floor((column - 2 * PAD) / (width + 3)));
    if (Math.ceil(buckets / across) <= 4) return { width, height, across };
  }
  return { width: 4, height: 8, across: Math.max(1, Math.floor((column - 2 * PAD) / 5)) };
}

export function machineLayout(ranks, width) {
  const right = ranks.some((one) => one.for.length) ? ARROWS : 0;
  const column = (width - right) / STATES.length;
  const most = Math.max(1, ...ranks.map((one) => one.buckets.length));
  const tile = tileSize(most, column);
  let y = HEAD;
  const rows = ranks.map((one) => {
    const counts = STATES.map((state) => one.buckets.filter(([its]) => its === state).length);
    const lines = Math.max(1, ...counts.map((count) => Math.ceil(count / tile.across)));
    const row = { rank: one, y, height: TITLE + lines * (tile.height + 3) + 2 * PAD };
    y += row.height + 6;
    return row;
  });
  return { rows, tile, column, right, height: y + 4 };
}

// drawing: of ChartCanvas.begin; returns its regions
export function paintMachine({ pen, width, theme }, layout) {
  paintColumns(pen, theme, layout);
  const regions = layout.rows.flatMap((row) => paintRow(pen, theme, layout, row));
  layout.rows.forEach((row) =>
    row.rank.for.forEach((other, index) => paintWait(pen, layout, row, other, width, index)),
  );
  return regions;
}

function paintColumns(pen, theme, { column, right }) {
  pen.textAlign = "center";
  STATES.forEach((state, index) => {
    const x = index * column;
    pen.fillStyle = theme.panel;
    pen.fillRect(x + 2, 0, column - 4, HEAD - 16);
    pen.fillStyle = theme.ink;
    pen.font = `600 12px ${theme.font}`;
    pen.fillText(state, x + column / 2, 12);
    if (!index) return;
    pen.fillStyle = theme.muted;
    pen.font = `600 13px ${theme.font}`;
    pen.fillText("→", x, 12);
    pen.font = `10.5px ${theme.font}`;
    if (pen.measureText(GATES[index - 1]).width < column - 8) pen.fillText(GATES[index - 1], x, HEAD - 7);
  });
  if (right) pen.fillText("waits for", STATES.length * column + right / 2, 12);
}

// Lines between the stages, below the rank's sentence.
function paintStages(pen, theme, column, top, bottom) {
  pen.strokeStyle = theme.grid;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  for (let index = 1; index < STATES.length; index++) {
    pen.moveTo(Math.round(index * column) + 0.5, top);
    pen.lineTo(Math.round(index * column) + 0.5, bottom - 1);
  }
  pen.stroke();
  pen.setLineDash([]);
}

function paintRow(pen, theme, { tile, column, right }, { rank, y, height }) {
  const width = column * STATES.length;
  const paused = rank.kind === "paused";
  pen.strokeStyle = paused ? COLOURS.bad : theme.grid;
  pen.lineWidth = paused ? 2 : 1;
  pen.strokeRect(1, y, width - 2, height);
  if (paused) paintPause(pen, 8, y + 5, 12);
  paintStages(pen, theme, column, y + TITLE, y + height);
  pen.textAlign = "left";
  pen.fillStyle = theme.ink;
  pen.font = `600 12px ${theme.font}`;
  const name = `rank ${rank.rank}`;
  const x = paused ? 26 : 8;
  pen.fillText(name, x, y + 12);
  const after = x + pen.measureText(name).width + 8;
  pen.font = `12px ${theme.font}`;
  pen.fillStyle = paused ? theme.ink : theme.muted;
  pen.fillText(
    fit(
      pen,
      rank.text.includes(`step ${rank.step}`) ? rank.text : `step ${rank.step}: ${rank.text}`,
      width - after - 8,
    ),
    after,
    y + 12,
  );
  const regions = [
    {
      key: `rank ${rank.rank}`,
      x: 0,
      y,
      width: width + right,
      height: TITLE,
      lines: () => [name, ["step", String(rank.step)], ...wrap(rank.text)],
    },
  ];
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  rank.buckets.forEach(([state, arrived, of, missing, more], bucket) => {
    const place = counts[state]++;
    const at = {
      x: STATES.indexOf(state) * column + PAD + (place % tile.across) * (tile.width + 3),
      y: y + TITLE + PAD + Math.floor(place / tile.across) * (tile.height + 3),
    };
    const lines = () => [
      `rank ${rank.rank} · bucket ${bucket}`,
      ["state", state],
      ["gradients", `${arrived} of ${of}`],
      ...missing.map((one) => ["missing", one]),
      ...(more ? [["", `and ${more} more`]] : []),
    ];
    const words = [...(state === "pending" ? [`b${bucket}: ${arrived}/${of}`] : []), `b${bucket}`, String(bucket)];
    regions.push({
      ...at,
      key: `tile ${rank.rank} ${bucket}`,
      width: tile.width,
      height: tile.height,
      colour: bucketColour(bucket, rank.buckets.length, theme.dark),
      share: state === "pending" ? arrived / Math.max(of, 1) : 1,
      alpha: rank.inFlight ? 1 : 0.6,
      edge: 1,
      here: rank.bucket === bucket && (paused ? "bad" : "waiting"),
      font: "600 11px",
      texts: tile.width >= 20 ? words : [],
      centred: true,
      lines,
    });
  });
  paintTiles({ pen, theme }, regions.slice(1));
  return regions;
}

function paintPause(pen, x, y, size) {
  pen.fillStyle = COLOURS.bad;
  pen.fillRect(x, y, size * 0.36, size + 2);
  pen.fillRect(x + size * 0.64, y, size * 0.36, size + 2);
}

// An arrow in the right margin from a rank to one that it waits for.
function paintWait(pen, layout, row, other, width, index) {
  const to = layout.rows.find((one) => one.rank.rank === other);
  if (!to) return;
  const x = layout.column * STATES.length;
  const [from, end] = [row.y + TITLE / 2 + 2, to.y + TITLE / 2 + (row.y < to.y ? -4 : 8)];
  const out = Math.min(x + 18 + 9 * index, width - 4);
  pen.strokeStyle = pen.fillStyle = COLOURS.waiting;
  pen.lineWidth = 2.5;
  pen.beginPath();
  pen.moveTo(x + 1, from);
  pen.bezierCurveTo(out + 14, from, out + 14, end, x + 8, end);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x, end);
  pen.lineTo(x + 9, end - 5);
  pen.lineTo(x + 9, end + 5);
  pen.fill();
}

function fit(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}

// Lines of a tip that is not wide.
function wrap(text) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (`${lines.at(-1)} ${word}`.length > 44) lines.push(word);
    else lines[lines.length - 1] = `${lines.at(-1)} ${word}`.trim();
  }
  return lines.map((line) => ["", line]);
}
