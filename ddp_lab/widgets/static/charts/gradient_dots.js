// When each gradient of a bucket was accumulated, on each rank: one row for each parameter, in the order of readiness.

import { RANK_COLOURS } from "../generated.js";
import { ChartCanvas, median, roundMarks } from "./canvas.js";
import { milliseconds } from "./theme.js";

// The shapes tell the ranks apart without colour.
const MOST_SHAPES = RANK_COLOURS.length;
const [LEFT, RIGHT, ROW, AXIS] = [150, 14, 15, 34];
const MOST_ROWS = 40;

export class GradientDots {
  constructor(actions) {
    this.chart = new ChartCanvas("When each gradient of the bucket was ready, on each rank", actions);
    this.node = this.chart.node;
  }

  // found: {ranks, ms: [rank][parameter of the bucket], step}; names: of the bucket's parameters
  draw(found, names) {
    const middles = names.map((_, index) => median(found.ms.map((row) => row[index] ?? NaN)));
    const order = [...names.keys()].sort((a, b) => (middles[a] || Infinity) - (middles[b] || Infinity)).slice(0, MOST_ROWS);
    const drawing = this.chart.begin(order.length * ROW + AXIS + 18);
    if (drawing) this.chart.finish(this.paint(drawing, found, names, order));
  }

  paint({ pen, width, theme }, found, names, order) {
    const times = order.flatMap((index) => found.ms.map((row) => row[index])).filter((value) => value !== null);
    const last = Math.max(...times, 1e-6) * 1.04;
    const x = (value) => LEFT + (value / last) * (width - LEFT - RIGHT);
    const bottom = 18 + order.length * ROW;
    pen.font = `11px ${theme.font}`;
    paintLegend(pen, theme, found.ranks, width);
    for (const mark of roundMarks(last, Math.max(2, (width - LEFT) / 90))) {
      pen.fillStyle = theme.grid;
      pen.fillRect(Math.round(x(mark)), 18, 1, bottom - 18);
      pen.fillStyle = theme.muted;
      pen.textAlign = "center";
      pen.fillText(String(Number(mark.toPrecision(3))), x(mark), bottom + 9);
    }
    pen.fillText("ms since the rank's own backward began", (LEFT + width - RIGHT) / 2, bottom + 24);
    return order.map((index, row) => {
      const y = 18 + (row + 0.5) * ROW;
      const values = found.ms.map((of) => of[index]);
      pen.fillStyle = theme.ink;
      pen.textAlign = "right";
      pen.fillText(shortened(pen, names[index], LEFT - 12), LEFT - 6, y);
      if (found.ranks.length <= MOST_SHAPES) values.forEach((value, rank) => value !== null && paintShape(pen, rank, x(value), y));
      else paintRange(pen, theme, values.filter((value) => value !== null).map(x), y);
      const lines = () => [names[index], ...found.ranks.slice(0, 16).map((rank, of) => [`rank ${rank}`, values[of] === null ? "no gradient" : `${milliseconds(values[of])} ms`])];
      return { key: `gradient ${index}`, x: 0, y: y - ROW / 2, width, height: ROW, lines };
    });
  }
}

function shortened(pen, name, room) {
  let text = name;
  while (text.length > 4 && pen.measureText(text).width > room) text = `…${text.slice(2)}`;
  return text;
}

function paintLegend(pen, theme, ranks, width) {
  let x = LEFT;
  pen.textAlign = "left";
  if (ranks.length > MOST_SHAPES) {
    pen.fillStyle = theme.muted;
    return pen.fillText("line: from the first to the last rank; tick: the median", x, 8);
  }
  ranks.forEach((rank, index) => {
    if (x > width - 60) return;
    paintShape(pen, index, x + 4, 8);
    pen.fillStyle = theme.muted;
    pen.fillText(`rank ${rank}`, x + 12, 8);
    x += 62;
  });
}

// Circle, square, triangle, diamond: each filled, then hollow.
function paintShape(pen, index, x, y) {
  const size = 4;
  pen.beginPath();
  if (index % 4 === 0) pen.arc(x, y, size, 0, 7);
  else if (index % 4 === 1) pen.rect(x - size + 0.5, y - size + 0.5, 2 * size - 1, 2 * size - 1);
  else {
    const corners = index % 4 === 2 ? [[0, -size], [size, size - 0.5], [-size, size - 0.5]] : [[0, -size - 0.5], [size + 0.5, 0], [0, size + 0.5], [-size - 0.5, 0]];
    corners.forEach(([dx, dy]) => pen.lineTo(x + dx, y + dy));
    pen.closePath();
  }
  pen.fillStyle = pen.strokeStyle = RANK_COLOURS[index];
  pen.lineWidth = 1.6;
  if (index < 4) pen.fill();
  else pen.stroke();
}

function paintRange(pen, theme, points, y) {
  if (!points.length) return;
  const [first, last] = [Math.min(...points), Math.max(...points)];
  pen.fillStyle = theme.band;
  pen.fillRect(first, y - 1.5, Math.max(last - first, 1), 3);
  pen.fillStyle = theme.ink;
  pen.fillRect(median(points) - 1, y - 5, 2, 10);
}
