// A grid of cells, the stronger its colour the larger its value; columns narrower than a pixel are joined to their maximum.

import { COLOURS } from "../generated.js";

const LEFT = 62;

// grid: {title, rowNames, columns, value(row, column), columnName(column), axis, unit}; returns the regions
export function paintHeat({ pen, width, theme }, top, rowHeight, grid, lines, act) {
  const rows = grid.rowNames.length;
  const room = width - LEFT - 14;
  const join = Math.max(1, Math.ceil(grid.columns / room));
  const columns = Math.ceil(grid.columns / join);
  const cell = Math.min(room / Math.max(columns, 1), 64);
  const value = (row, column) => {
    let best = 0;
    for (let one = column * join; one < Math.min((column + 1) * join, grid.columns); one++) best = Math.max(best, grid.value(row, one));
    return best;
  };
  let largest = 0;
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) largest = Math.max(largest, value(row, column));
  const regions = [];
  const gap = cell > 6 && rowHeight > 6 ? 1 : 0;
  const every = Math.ceil(12 / rowHeight);
  grid.rowNames.forEach((name, row) => {
    const y = top + row * rowHeight;
    pen.font = `11px ${theme.font}`;
    pen.textAlign = "right";
    pen.fillStyle = theme.muted;
    if (row % every === 0) pen.fillText(name, LEFT - 6, y + rowHeight / 2);
    for (let column = 0; column < columns; column++) {
      const here = value(row, column);
      const share = largest > 0 ? here / largest : 0;
      const x = LEFT + column * cell;
      pen.fillStyle = theme.grid;
      pen.globalAlpha = 0.35;
      pen.fillRect(x, y, cell - gap, rowHeight - gap);
      pen.fillStyle = COLOURS.heat;
      pen.globalAlpha = share;
      pen.fillRect(x, y, cell - gap, rowHeight - gap);
      pen.globalAlpha = 1;
      if (cell >= 34 && rowHeight >= 14) {
        pen.fillStyle = share > 0.6 ? "#000" : theme.ink;
        pen.textAlign = "center";
        pen.fillText(here < 0.005 ? "·" : here < 10 ? here.toFixed(2) : here.toFixed(0), x + (cell - gap) / 2, y + rowHeight / 2);
      }
      const first = column * join;
      const last = Math.min(first + join, grid.columns) - 1;
      regions.push({ key: `${grid.title} ${row} ${column}`, x, y, width: cell, height: rowHeight, lines: () => lines(row, first, last, here), act: act && (() => act(row, last)) });
    }
  });
  paintColumns(pen, theme, grid, { columns, cell, join, y: top + rows * rowHeight, largest });
  return regions;
}

function paintColumns(pen, theme, grid, { columns, cell, join, y, largest }) {
  pen.fillStyle = theme.muted;
  pen.textAlign = "center";
  const every = Math.max(1, Math.ceil(40 / cell));
  for (let column = 0; column < columns; column += every) pen.fillText(grid.columnName(column * join), LEFT + (column + 0.5) * cell, y + 9);
  pen.textAlign = "left";
  const joined = join > 1 ? `; each column: the largest of ${join}` : "";
  pen.fillText(`${grid.axis}${joined}; full colour: ${largest < 10 ? largest.toFixed(2) : largest.toFixed(0)} ${grid.unit}`, LEFT, y + 24);
}
