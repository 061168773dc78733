// Paints a layout on a canvas: no state, no events.

import { AXIS_HEIGHT, HEADER_HEIGHT, LABEL_WIDTH, PART, RIGHT_MARGIN } from "./layout.js";
import { PARTS, milliseconds } from "./theme.js";

const MIN_BAR = 0.8;

// view: {width, height, scroll, theme, fills, selected: bucket | null, cursor: {row, bucket} | null, axis}
export function paint(pen, record, layout, view) {
  const { width, height, theme } = view;
  const plot = height - AXIS_HEIGHT;
  pen.clearRect(0, 0, width, height);
  pen.save();
  pen.beginPath();
  pen.rect(0, 0, width, plot);
  pen.clip();
  pen.translate(0, -view.scroll);
  const visible = (y, size) => y + size >= view.scroll && y <= view.scroll + plot;
  paintGrid(pen, layout, view, plot);
  for (const band of layout.bands) if (visible(band.y, layout.group)) paintRank(pen, record, layout, band, view);
  const bars = layout.bars.filter((bar) => visible(bar.y, bar.height));
  PARTS.forEach((_, part) => {
    pen.fillStyle = view.fills[part];
    for (const bar of bars) {
      if (bar.part !== part) continue;
      pen.globalAlpha = bar.open ? 0.55 : 1;
      pen.fillRect(bar.x, bar.y, Math.max(bar.width, MIN_BAR), bar.height);
    }
  });
  pen.globalAlpha = 1;
  paintLetters(pen, bars, theme);
  paintMarkers(pen, layout, view);
  pen.restore();
  paintAxis(pen, layout, view, plot);
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

// The rank's header: its name, a band for its backward and a hollow one for finalize; below, the buckets' numbers.
function paintRank(pen, record, layout, band, view) {
  const { theme } = view;
  const middle = band.y + HEADER_HEIGHT / 2 + 1;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.font = `600 12px ${theme.font}`;
  pen.fillStyle = theme.ink;
  pen.fillText(`rank ${record.ranks[band.row]}`, 4, middle);
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
  write(pen, `finalize ${milliseconds(end - finalize)} ms`, band.split + 4, middle, band.end - band.split - 6, "finalize");
  const every = Math.ceil(11 / layout.rowHeight);
  pen.font = `${Math.min(11, Math.max(9, layout.rowHeight - 4))}px ${theme.font}`;
  pen.textAlign = "right";
  for (let bucket = 0; bucket < record.buckets; bucket += every) {
    const y = band.y + HEADER_HEIGHT + (bucket + 0.5) * layout.rowHeight;
    const chosen = bucket === view.selected;
    pen.fillStyle = chosen ? theme.ink : theme.muted;
    pen.fillText(every === 1 && layout.rowHeight >= 12 ? `bucket ${bucket}` : `${bucket}`, LABEL_WIDTH - 6, y);
  }
}

// Writes the text if it fits, else the shorter one, else nothing.
function write(pen, text, x, y, room, shorter) {
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
  const zero = view.axis === "rank" ? "each rank's own backward began" : "the first rank's backward began";
  pen.fillText(`ms since ${zero}`, (LABEL_WIDTH + width - RIGHT_MARGIN) / 2, plot + 29);
}
