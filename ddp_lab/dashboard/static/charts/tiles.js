// Boxes: those of a scene, in the cells of two axes of lanes, and those that lie where they are told.

import { COLOURS } from "../generated.js";
import { colourOf, fitEnd, tipOf, write } from "./pen.js";
import { bucketColour } from "./theme.js";

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

// A panel whose columns and rows have names and remarks; arrows lead from row to row.
export function tiles([panel], { width }) {
  const layout = layOut(panel, width);
  return [
    layout.height,
    (drawing) => {
      paintColumns(drawing, panel, layout);
      const regions = panel.y.lanes.flatMap((_, row) => paintRow(drawing, panel, layout, row));
      for (const { begin, end } of layout.arrows)
        begin.forEach((from, index) => paintWait(drawing.pen, layout, from, end[index], width, index));
      return regions;
    },
  ];
}

function layOut({ x, y, marks: [boxes, ...arrows] }, width) {
  const right = arrows.length ? ARROWS : 0;
  const column = (width - right) / x.lanes.length;
  const inRow = y.lanes.map((_, row) => [...boxes.y.keys()].filter((index) => boxes.y[index] === row));
  const tile = tileSize(Math.max(1, ...inRow.map((one) => one.length)), column);
  let top = HEAD;
  const rows = inRow.map((indices) => {
    const counts = x.lanes.map((_, lane) => indices.filter((index) => boxes.x[index] === lane).length);
    const lines = Math.max(1, ...counts.map((count) => Math.ceil(count / tile.across)));
    const row = { indices, y: top, height: TITLE + lines * (tile.height + 3) + 2 * PAD };
    top += row.height + 6;
    return row;
  });
  return { rows, tile, column, right, arrows, width: column * x.lanes.length, height: top + 4 };
}

function paintColumns({ pen, theme }, { x }, { column, right, width, arrows }) {
  x.lanes.forEach((name, index) => {
    const left = index * column;
    fillBox(pen, theme.panel, left + 2, 0, column - 4, HEAD - 16);
    write(pen, theme, name, left + column / 2, 12, "center", "ink", "600 12px");
    const note = x.notes[index];
    if (!note) return;
    write(pen, theme, "→", left, 12, "center", "muted", "600 13px");
    pen.font = `10.5px ${theme.font}`;
    if (pen.measureText(note).width < column - 8) write(pen, theme, note, left, HEAD - 7, "center", "muted", "10.5px");
  });
  if (right) write(pen, theme, arrows[0].name, width + right / 2, 12, "center", "muted", "10.5px");
}

// Lines between the columns, below the row's sentence.
function paintStages(pen, theme, count, column, top, bottom) {
  pen.strokeStyle = theme.grid;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  for (let index = 1; index < count; index++) {
    pen.moveTo(Math.round(index * column) + 0.5, top);
    pen.lineTo(Math.round(index * column) + 0.5, bottom - 1);
  }
  pen.stroke();
  pen.setLineDash([]);
}

function paintRow({ pen, theme }, { x, y, marks: [boxes] }, { rows, tile, column, right, width }, lane) {
  const { indices, y: top, height } = rows[lane];
  const strong = y.headings.includes(lane);
  pen.strokeStyle = strong ? COLOURS.bad : theme.grid;
  pen.lineWidth = strong ? 2 : 1;
  pen.strokeRect(1, top, width - 2, height);
  if (strong) paintPause(pen, 8, top + 5, 12);
  paintStages(pen, theme, x.lanes.length, column, top + TITLE, top + height);
  const left = strong ? 26 : 8;
  write(pen, theme, y.lanes[lane], left, top + 12, "left", "ink", "600 12px");
  const after = left + pen.measureText(y.lanes[lane]).width + 8;
  pen.font = `12px ${theme.font}`;
  const note = fitEnd(pen, y.notes[lane], width - after - 8);
  write(pen, theme, note, after, top + 12, "left", strong ? "ink" : "muted", "12px");
  const counts = x.lanes.map(() => 0);
  const regions = indices.map((index) => {
    const place = counts[boxes.x[index]]++;
    return {
      x: boxes.x[index] * column + PAD + (place % tile.across) * (tile.width + 3),
      y: top + TITLE + PAD + Math.floor(place / tile.across) * (tile.height + 3),
      key: `tile ${index}`,
      width: tile.width,
      height: tile.height,
      colour: bucketColour(boxes.shade[index], 2, theme.dark),
      share: boxes.filled[index],
      alpha: boxes.faint[lane] ? 0.6 : 1,
      edge: 1,
      here: boxes.edges[index],
      font: "600 11px",
      texts: tile.width >= 20 ? boxes.texts[index] : [],
      centred: true,
      lines: () => tipOf(boxes.tips[index]),
    };
  });
  paintTiles({ pen, theme }, regions);
  const whole = { key: y.lanes[lane], x: 0, y: top, width: width + right, height: TITLE };
  return [{ ...whole, lines: () => tipOf(y.tips[lane]) }, ...regions];
}

function paintPause(pen, x, y, size) {
  fillBox(pen, COLOURS.bad, x, y, size * 0.36, size + 2);
  fillBox(pen, COLOURS.bad, x + size * 0.64, y, size * 0.36, size + 2);
}

// An arrow in the right margin from a rank to one that it waits for.
function paintWait(pen, layout, begin, target, width, index) {
  const [row, to] = [layout.rows[begin], layout.rows[target]];
  const x = layout.width;
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

// ---- anywhere ---------------------------------------------------------------------------------------------

// Paints boxes that lie where they are told, in pixels, and returns them as regions: {key, x, y, width, height,
// colour: {fill, ink}, gap: to its right and below, share: of its width that is filled, alpha, edge: how strong its
// line is, hatched, chosen, here: colour of an outline, texts: of which the first that fits is written, font, centred,
// lines(), act()}.
export function paintTiles({ pen, theme }, tiles) {
  for (const tile of tiles) {
    const [right, below] = tile.gap ?? [0, 0];
    const one = { ...tile, width: Math.max(tile.width - right, 1), height: tile.height - below };
    paintBox(pen, theme, one);
    writeTile(pen, theme, one);
    if (one.chosen) {
      strokeBox(pen, theme.paper, 4, one, 2);
      strokeBox(pen, theme.ink, 2, one, 1);
    }
    if (one.here) strokeBox(pen, colourOf(one.here, theme), 3, one, -1);
  }
  return tiles;
}

function paintBox(pen, theme, tile) {
  const { x, y, width, height, colour, share = 1 } = tile;
  pen.globalAlpha = tile.alpha ?? 1;
  if (share < 1) fillBox(pen, theme.panel, x, y, width, height);
  fillBox(pen, colour.fill, x, y, width * share, height);
  if (tile.edge && width > 5) strokeBox(pen, theme.muted, 1, tile, 0.5, tile.edge);
  pen.globalAlpha = 1;
  if (tile.hatched) hatch(pen, tile, colour.ink);
}

// The first text that fits, each part in the ink that is read on it.
function writeTile(pen, theme, tile) {
  const { width, colour, centred, share = 1 } = tile;
  pen.font = `${tile.font ?? "11px"} ${theme.font}`;
  const text = tile.texts?.find((words) => pen.measureText(words).width <= width - (centred ? 4 : 7));
  if (!text) return;
  writeInside(pen, tile, text, colour.ink, 0, share);
  if (share < 1) writeInside(pen, tile, text, theme.ink, share, 1);
}

function fillBox(pen, colour, x, y, width, height) {
  pen.fillStyle = colour;
  pen.fillRect(x, y, width, height);
}

// A line along the edge, so far inside.
function strokeBox(pen, colour, thick, { x, y, width, height }, inside, alpha = pen.globalAlpha) {
  pen.strokeStyle = colour;
  pen.lineWidth = thick;
  pen.globalAlpha = Math.min(alpha, pen.globalAlpha);
  pen.strokeRect(x + inside, y + inside, Math.max(width - 2 * inside, 1), height - 2 * inside);
}

// A tile's text, as far as it lies between two shares of the tile's width.
function writeInside(pen, { x, y, width, height, centred }, text, ink, from, to) {
  pen.save();
  pen.beginPath();
  pen.rect(x + width * from, y, width * (to - from), height);
  pen.clip();
  pen.fillStyle = ink;
  pen.textAlign = centred ? "center" : "left";
  pen.fillText(text, centred ? x + width / 2 : x + 4, y + Math.min(height, 33) / 2 + 0.5);
  pen.restore();
}

function hatch(pen, { x, y, width, height }, colour) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = colour;
  pen.globalAlpha = 0.6;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.restore();
}
