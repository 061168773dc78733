// Paints scenes: the content of a view in data units. Its marks get pixels and colours, and become regions for the
// pointer and the keyboard. A role is the name of a colour of the page (readTheme), or else of the palette.
//
// Upright: {steps: [{key, name, chosen, lines(), act()}], label, head: pixels above the first panel, panels: [panel]},
// steps equally far from each other; a panel: {label, height, top, low: of a logarithmic scale, text(value), marks}.
// Lying: {lanes: [{name, note, strong, key, lines()}], height: of a lane, left, right, label, top,
// keys: [{name, shape, role}] of the dots, marks}; a lane with lines() is a region as a whole.
// Grids of cells: {grids: [{title, heading, rows: names, columns, value(row, column), name(column), axis, unit, lines,
// act}], height}.
//
// Marks, `values` having one for each step or lane and null or NaN for a gap:
//   {bars: values, role}: each on top of those before it; lying ones with lines(lane), at their end text(lane)
//   {line: values, role, width, dash}
//   {band: [values, values]}
//   {rule: place among the steps, role, text}
//   {dots: values, lane, role, shape, size, rows: whether each lies lower than the one after it}
//   {span: [begin, end], lane}, {tick: value, lane}
//   {boxes: [{lane, begin, end, role, key, thin, lines()}]}

import { COLOURS } from "../generated.js";
import { ending, milliseconds } from "./theme.js";

const LEFT = 58; // of upright panels: the numbers stand there
const RIGHT = 14;
const [PANEL_GAP, AXIS] = [26, 34];
const WIDEST = 40; // column of a step
const CELLS_LEFT = 62;
const HIGHEST = 21; // row of cells

const colourOf = (role, theme) => theme[role] ?? COLOURS[role] ?? role;
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const short = (value) => String(Number(value.toPrecision(3)));

// Round numbers from 0 to `top` for an axis.
function roundMarks(top, count = 5) {
  if (!(top > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(top / count));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= (top / count) * 0.999);
  return Array.from({ length: Math.floor(top / unit + 1e-9) + 1 }, (_, index) => index * unit);
}

export function write(pen, theme, text, x, y, align = "left", role = "muted", font = "11px") {
  pen.font = `${font} ${theme.font}`;
  pen.textAlign = align;
  pen.fillStyle = colourOf(role, theme);
  pen.fillText(text, x, y);
}

// Draws the scene of `make()` on a ChartCanvas, if it is visible.
export function drawScene(chart, make) {
  if (!chart.hasRoom) return;
  const scene = make();
  const [height, paint] = scene.steps ? upright(scene) : scene.lanes ? lying(scene) : cells(scene);
  chart.finish(paint(chart.begin(height)));
}

// ---- scenes of the kernel ---------------------------------------------------------------------------------

const [LANE, LANES_LEFT, UPRIGHT, CELLS] = [20, 210, 280, 220];

// A scene as scene_json.py writes it, in the shape above. actions: {choose(step), select(bucket)}: a click, where an
// axis chooses something; shown: the step that the page shows.
export function sceneOf({ panels }, actions, shown) {
  const [first] = panels;
  const kinds = first.marks.map(({ kind }) => kind);
  if (kinds[0] === "cells") return { height: CELLS, grids: panels.map((panel) => gridOf(panel, actions)) };
  return first.y.lanes.length ? lanesOf(first) : stepsOf(panels, actions, shown);
}

const CHOOSES = {
  step: (actions, axis, place) => actions.choose(Number(axis.lanes[place])),
  bucket: (actions, _, place) => actions.select(place),
};

function gridOf({ x, y, marks: [{ values, unit, name }], heading }, actions) {
  const act = CHOOSES[x.chooses];
  return {
    title: x.label,
    heading,
    rows: y.lanes,
    columns: x.lanes.length,
    value: (row, column) => values[row][column] ?? 0,
    name: (column) => x.lanes[column],
    axis: x.label,
    unit,
    lines: (row, from, to, value) => [
      `${y.lanes[row]} · ${x.label} ${x.lanes[from]}${to > from ? ` – ${x.lanes[to]}` : ""}`,
      [name, `${milliseconds(value)} ${unit.split(" ")[0]}`],
    ],
    act: act && ((_, column) => act(actions, x, column)),
  };
}

function lanesOf({ x, y, marks }) {
  const strong = new Set(y.headings);
  const named = (name, at) => (y.notes[at] ? `${name}: ${y.notes[at]}` : name);
  const spans = marks.filter(({ kind }) => kind === "spans");
  const bars = marks.filter(({ kind }) => kind === "bars");
  const whole = (lane) =>
    bars.reduce(
      (sum, { at, size }) => sum + at.reduce((own, one, index) => own + (one === lane ? size[index] : 0), 0),
      0,
    );
  return {
    lanes: y.lanes.map((name, at) => ({ name: named(name, at), strong: strong.has(at) })),
    height: spans.length ? LANE : 26,
    left: spans.length ? LANES_LEFT : Math.min(LANES_LEFT, 16 + 7 * Math.max(...y.lanes.map((name) => name.length))),
    right: bars.length ? 90 : undefined,
    label: x.label,
    top: x.top,
    marks: [
      ...spans.map(({ role, thin, lane, begin, end, tips, name }) => ({
        boxes: lane.map((one, index) => ({
          lane: one,
          begin: begin[index],
          end: end[index],
          thin,
          role,
          key: `${one} ${name} ${begin[index]}`,
          lines: () => tipOf(tips[index] ?? name),
        })),
      })),
      ...bars.map(({ name, role, at, size, texts, tips }) => {
        const place = new Map(at.map((lane, index) => [lane, index]));
        const sizes = y.lanes.map((_, lane) => size[place.get(lane)] ?? 0);
        return {
          bars: sizes,
          role,
          lines: (lane) =>
            tips.length
              ? tipOf(tips[place.get(lane)])
              : [
                  y.lanes[lane],
                  [name, `${milliseconds(sizes[lane])} ${x.unit}`],
                  ["all", `${milliseconds(whole(lane))} ${x.unit}`],
                ],
          text: texts.length > 0 && ((lane) => texts[place.get(lane)] ?? ""),
        };
      }),
    ],
  };
}

// The first line is a title; the others are texts alone.
function tipOf(text) {
  const [title, ...lines] = text.split("\n");
  return [title, ...lines.map((line) => ["", line])];
}

// Steps that a scene names anywhere are columns, equally far from each other.
function stepsOf(panels, actions, shown) {
  const [{ x }] = panels;
  const places = ({ at, x: along }) => at ?? along ?? [];
  const steps = [
    ...new Set(
      panels.flatMap(({ marks }) => marks.flatMap((mark) => (mark.kind === "rule" ? [mark.x] : places(mark)))),
    ),
  ].sort((a, b) => a - b);
  const index = new Map(steps.map((step, place) => [step, place]));
  const spread = (mark, values, gap) => {
    const made = new Array(steps.length).fill(gap);
    places(mark).forEach((step, place) => (made[index.get(step)] = values[place] ?? gap));
    return made;
  };
  const painted = panels.map(({ y, marks, share }) => ({
    label: y.label,
    height: UPRIGHT * share,
    top: y.top,
    marks: marks.map((mark) => {
      if (mark.kind === "rule") return { rule: index.get(mark.x), role: mark.role, text: mark.text };
      if (mark.kind === "bars")
        return { bars: spread(mark, mark.size, 0), role: mark.role, name: mark.name, unit: y.unit };
      return {
        line: spread(mark, mark.y, null),
        role: mark.role === "line" ? "ink" : mark.role,
        width: mark.width,
        name: mark.name,
        unit: y.unit,
      };
    }),
  }));
  const end = (place) => x.ends[place] ?? steps[place];
  const lines = (place) => {
    const title =
      end(place) > steps[place] ? `${x.label}s ${steps[place]}–${end(place)} (medians)` : `${x.label} ${steps[place]}`;
    const told = painted.flatMap(({ marks }, number) => {
      const bars = marks.filter((one) => one.bars);
      const { total } = panels[number];
      const sum =
        total && bars.length
          ? [[total, `${milliseconds(bars.reduce((all, one) => all + one.bars[place], 0))} ${bars[0].unit}`]]
          : [];
      return [
        ...sum,
        ...marks
          .toReversed()
          .filter((one) => one.name)
          .map((one) => [one.name, `${milliseconds((one.bars ?? one.line)[place])} ${one.unit}`]),
      ];
    });
    return [title, ...told];
  };
  const act = x.chooses === "step" ? (place) => () => actions.choose(end(place)) : () => undefined;
  const joined = x.ends.length ? x.ends[0] - steps[0] + 1 : 1;
  return {
    label: joined > 1 ? `${x.label} (each column: median of ${joined})` : x.label,
    steps: steps.map((step, place) => ({
      key: `${x.label} ${step}`,
      name: String(step),
      chosen: x.chooses === "step" && step <= shown && shown <= end(place),
      lines: () => lines(place),
      act: act(place),
    })),
    panels: painted,
  };
}

// ---- upright ----------------------------------------------------------------------------------------------

function upright({ steps, panels, label, head = 10 }) {
  let bottom = head - PANEL_GAP;
  const placed = panels.map((panel) => {
    const top = bottom + PANEL_GAP;
    bottom = top + panel.height;
    return { ...panel, place: top, y: level(panel, top) };
  });
  return [
    bottom + AXIS,
    (drawing) => {
      const { pen, width, theme } = drawing;
      const wide = Math.min((width - LEFT - RIGHT) / steps.length, WIDEST);
      const x = (index) => LEFT + (index + 0.5) * wide;
      for (const panel of placed) {
        paintScale(drawing, panel);
        paintBars(drawing, panel, steps, x, wide);
        for (const mark of panel.marks) paintUpright(drawing, panel, mark, x);
      }
      const [first] = placed;
      pen.fillStyle = theme.ink;
      steps.forEach(
        (one, index) =>
          one.chosen && pen.fillRect(x(index) - wide / 2, first.place + first.height + 2, Math.max(wide - 1, 2), 3),
      );
      const every = Math.max(1, Math.ceil(56 / wide));
      steps.forEach(
        ({ name }, index) => index % every === 0 && write(pen, theme, name, x(index), bottom + 12, "center"),
      );
      write(pen, theme, label, LEFT, bottom + 26);
      return steps.map((one, index) => ({
        ...one,
        x: x(index) - wide / 2,
        y: first.place,
        width: wide,
        height: bottom - first.place,
      }));
    },
  ];
}

// From a value to a pixel.
function level({ top, low, height }, place) {
  if (low === undefined) return (value) => place + height * (1 - Math.max(0, Math.min(value, top)) / top);
  const [from, to] = [Math.log10(low), Math.log10(top)];
  return (value) => place + height * (1 - (Math.log10(Math.max(value, low)) - from) / (to - from));
}

// Horizontal lines with their numbers, and what they measure.
function paintScale({ pen, width, theme }, { label, top, low, height, place, y, text = short }) {
  const powers =
    low === undefined
      ? []
      : Array.from({ length: Math.round(Math.log10(top / low)) + 1 }, (_, index) => low * 10 ** index);
  const marks =
    low === undefined
      ? roundMarks(top, height > 100 ? 5 : 2)
      : powers.filter((_, index) => index % Math.ceil(powers.length / 6) === 0);
  for (const mark of marks) {
    pen.fillStyle = theme.grid;
    pen.fillRect(LEFT, Math.round(y(mark)), width - LEFT - RIGHT, 1);
    write(pen, theme, text(mark), LEFT - 6, y(mark), "right");
  }
  pen.save();
  pen.translate(10, place + height / 2);
  pen.rotate(-Math.PI / 2);
  write(pen, theme, label, 0, 0, "center");
  pen.restore();
}

function paintBars({ pen, theme }, { marks, y, top, place }, steps, x, wide) {
  const base = steps.map(() => 0);
  const stacked = marks.filter((one) => one.bars);
  for (const { bars, role } of stacked) {
    pen.fillStyle = colourOf(role, theme);
    bars.forEach((value, index) => {
      const upper = y(base[index] + value);
      pen.fillRect(x(index) - wide / 2, upper, Math.max(wide - (wide > 5 ? 1 : 0), 1), y(base[index]) - upper);
      base[index] += value;
    });
  }
  // Columns that exceed the scale.
  base.forEach((total, index) => stacked.length && total > top && paintArrow(pen, theme.ink, x(index), place + 1, 3));
}

function paintArrow(pen, colour, x, y, size) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x - size, y);
  pen.lineTo(x + size, y);
  pen.lineTo(x, y - 2 * size);
  pen.fill();
}

function paintUpright({ pen, theme }, { y, place, height }, mark, x) {
  if (mark.line) paintLine(pen, colourOf(mark.role, theme), mark, x, y);
  if (mark.band) {
    const [lows, highs] = mark.band;
    const there = [...lows.keys()].filter((index) => known(lows[index]));
    pen.fillStyle = theme.band;
    pen.globalAlpha = 0.35;
    pen.beginPath();
    for (const index of there) pen.lineTo(x(index), y(highs[index]));
    for (const index of there.toReversed()) pen.lineTo(x(index), y(lows[index]));
    pen.fill();
    pen.globalAlpha = 1;
  }
  if (mark.rule !== undefined) {
    paintArrow(pen, colourOf(mark.role, theme), x(mark.rule), place - 1, 4.5);
    pen.fillRect(x(mark.rule) - 0.75, place, 1.5, height);
    write(pen, theme, mark.text, x(mark.rule), place - 16, "center", mark.role);
  }
}

function paintLine(pen, colour, { line, width = 1.5, dash = [] }, x, y) {
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = width;
  pen.setLineDash(dash);
  pen.beginPath();
  line.forEach((value, index) => {
    if (!known(value)) return;
    if (index && known(line[index - 1])) pen.lineTo(x(index), y(value));
    else pen.moveTo(x(index), y(value));
  });
  pen.stroke();
  pen.setLineDash([]);
  if (line.length <= WIDEST)
    line.forEach((value, index) => known(value) && pen.fillRect(x(index) - 1.75, y(value) - 1.75, 3.5, 3.5));
}

// ---- lying ------------------------------------------------------------------------------------------------

function lying({ lanes, height, left, right = RIGHT, label, top, keys = [], marks }) {
  const head = keys.length ? 18 : 0;
  const bottom = head + lanes.length * height;
  return [
    bottom + AXIS,
    ({ pen, width, theme }) => {
      const x = (value) => left + (Math.min(value, top) / top) * (width - left - right);
      const middle = (lane) => head + (lane + 0.5) * height;
      let at = left;
      for (const { name, shape, role } of keys) {
        if (at > width - 60) break;
        if (role) paintShape(pen, colourOf(role, theme), shape, at + 4, 8);
        write(pen, theme, name, at + (role ? 12 : 0), 8);
        at += 62;
      }
      for (const mark of roundMarks(top, Math.max(2, (width - left) / 95))) {
        pen.fillStyle = theme.grid;
        pen.fillRect(Math.round(x(mark)), head, 1, bottom - head);
        write(pen, theme, short(mark), x(mark), bottom + 9, "center");
      }
      write(pen, theme, label, (left + width - right) / 2, bottom + 24, "center");
      lanes.forEach(({ name, note, strong }, lane) => {
        const font = `${strong ? "600 " : ""}${height < 20 ? 11 : 12}px`;
        pen.font = `${font} ${theme.font}`;
        write(pen, theme, fitEnd(pen, name, left - 12), left - 7, middle(lane) - (note ? 8 : 0), "right", "ink", font);
        if (note) write(pen, theme, note, left - 7, middle(lane) + 8, "right");
      });
      const whole = lanes.map((one, lane) => ({ ...one, x: 0, y: head + lane * height, width, height }));
      const bars = paintLying(pen, theme, marks, x, middle, height);
      return [...whole.filter((one) => one.lines), ...bars.sort((a, b) => a.y - b.y || a.x - b.x)];
    },
  ];
}

function paintLying(pen, theme, marks, x, middle, height) {
  const base = [];
  return marks.flatMap((mark) => {
    pen.fillStyle = colourOf(mark.role ?? "ink", theme);
    if (mark.bars) return paintLyingBars(pen, theme, mark, base, x, middle, height - 6);
    if (mark.dots)
      mark.dots.forEach(
        (value, index) =>
          known(value) &&
          paintShape(
            pen,
            pen.fillStyle,
            mark.shape,
            x(value),
            mark.rows
              ? middle(mark.lane) + (0.5 - (index + 0.5) / mark.dots.length) * (height - 16)
              : middle(mark.lane),
            mark.size,
          ),
      );
    if (mark.span)
      pen.fillRect(x(mark.span[0]), middle(mark.lane) - 1.5, Math.max(x(mark.span[1]) - x(mark.span[0]), 1), 3);
    if (mark.boxes) return paintBoxes(pen, theme, mark.boxes, x, middle, height - 6);
    if (known(mark.tick)) pen.fillRect(x(mark.tick) - 1.25, middle(mark.lane) - height / 2 + 3, 2.5, height - 6);
    return [];
  });
}

function paintLyingBars(pen, theme, { bars, role, lines, text }, base, x, middle, high) {
  return bars
    .map((value, lane) => {
      const begin = base[lane] ?? 0;
      base[lane] = begin + value;
      const box = { x: x(begin), y: middle(lane) - high / 2, width: x(base[lane]) - x(begin), height: high };
      pen.fillStyle = colourOf(role, theme);
      pen.fillRect(box.x, box.y, box.width, box.height);
      if (text) write(pen, theme, text(lane), x(base[lane]) + 6, middle(lane), "left", "ink", "12px");
      return { ...box, key: `${lane} ${role}`, lines: () => lines(lane) };
    })
    .filter((one) => one.width > 0);
}

function paintBoxes(pen, theme, boxes, x, middle, high) {
  return boxes.map((one) => {
    const tall = one.thin ? Math.max(2, Math.round(high / 4)) : high; // at the lower edge
    const box = {
      ...one,
      x: x(one.begin),
      y: middle(one.lane) + high / 2 - tall,
      width: Math.max(x(one.end) - x(one.begin), 1),
      height: tall,
    };
    pen.fillStyle = colourOf(one.role, theme);
    pen.fillRect(box.x, box.y, box.width, box.height);
    return box;
  });
}

// Circle, square, triangle, diamond: each filled, then hollow.
function paintShape(pen, colour, index, x, y, size = 4) {
  pen.beginPath();
  if (index % 4 === 0) pen.arc(x, y, size, 0, 7);
  else if (index % 4 === 1) pen.rect(x - size + 0.5, y - size + 0.5, 2 * size - 1, 2 * size - 1);
  else {
    const corners =
      index % 4 === 2
        ? [
            [0, -size],
            [size, size - 0.5],
            [-size, size - 0.5],
          ]
        : [
            [0, -size - 0.5],
            [size + 0.5, 0],
            [0, size + 0.5],
            [-size - 0.5, 0],
          ];
    corners.forEach(([dx, dy]) => pen.lineTo(x + dx, y + dy));
    pen.closePath();
  }
  pen.fillStyle = pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  if (index < 4) pen.fill();
  else pen.stroke();
}

// The end of a text that is too long.
function fitEnd(pen, text, room) {
  let shown = text;
  while (shown.length > 4 && pen.measureText(shown).width > room) shown = `…${shown.slice(2)}`;
  return shown;
}

// ---- cells ------------------------------------------------------------------------------------------------

// Larger values have a stronger colour; columns narrower than a pixel are joined to their maximum.
function cells({ grids, height: most }) {
  const high = Math.min(Math.max(Math.floor(most / grids[0].rows.length), 5), HIGHEST);
  const heads = grids.map(({ heading }) => (heading ? 20 : 2));
  const each = high * grids[0].rows.length + 34;
  return [
    heads.reduce((sum, head) => sum + head + each, 0),
    (drawing) => {
      let top = 0;
      return grids.flatMap((grid, index) => {
        if (grid.heading) write(drawing.pen, drawing.theme, grid.heading, 4, top + 9, "left", "ink", "600 11.5px");
        const regions = paintGrid(drawing, grid, top + heads[index], high);
        top += heads[index] + each;
        return regions;
      });
    },
  ];
}

function paintGrid({ pen, width, theme }, grid, top, high) {
  const join = Math.max(1, Math.ceil(grid.columns / (width - CELLS_LEFT - RIGHT)));
  const columns = Math.ceil(grid.columns / join);
  const wide = Math.min((width - CELLS_LEFT - RIGHT) / Math.max(columns, 1), 64);
  const last = (column) => Math.min((column + 1) * join, grid.columns) - 1;
  const values = grid.rows.map((_, row) =>
    Array.from({ length: columns }, (_, column) => {
      let best = 0;
      for (let one = column * join; one <= last(column); one++) best = Math.max(best, grid.value(row, one));
      return best;
    }),
  );
  const largest = values.reduce((most, row) => row.reduce((best, one) => Math.max(best, one), most), 0);
  const gap = wide > 6 && high > 6 ? 1 : 0;
  const regions = values.flatMap((row, index) => {
    const y = top + index * high;
    if (index % Math.ceil(12 / high) === 0) write(pen, theme, grid.rows[index], CELLS_LEFT - 6, y + high / 2, "right");
    return row.map((value, column) => {
      const box = { x: CELLS_LEFT + column * wide, y, width: wide, height: high };
      paintCell(pen, theme, value, largest > 0 ? value / largest : 0, box, gap);
      return {
        ...box,
        key: `${grid.title} ${index} ${column}`,
        lines: () => grid.lines(index, column * join, last(column), value),
        act: grid.act && (() => grid.act(index, last(column))),
      };
    });
  });
  const bottom = top + values.length * high;
  const names = Array.from({ length: columns }, (_, column) => ending(grid.name(column * join)));
  const room = Math.max(40, 8 + 6 * Math.max(...names.map((name) => name.length)));
  for (let column = 0; column < columns; column += Math.max(1, Math.ceil(room / wide)))
    write(pen, theme, names[column], CELLS_LEFT + (column + 0.5) * wide, bottom + 9, "center");
  const joined = join > 1 ? `; each column: the largest of ${join}` : "";
  write(pen, theme, `${grid.axis}${joined}; full colour: ${rounded(largest)} ${grid.unit}`, CELLS_LEFT, bottom + 24);
  return regions;
}

const rounded = (value) => value.toFixed(value < 10 ? 2 : 0);

function paintCell(pen, theme, value, share, { x, y, width, height }, gap) {
  for (const [role, alpha] of [
    ["grid", 0.35],
    ["heat", share],
  ]) {
    pen.fillStyle = colourOf(role, theme);
    pen.globalAlpha = alpha;
    pen.fillRect(x, y, width - gap, height - gap);
  }
  pen.globalAlpha = 1;
  if (width < 34 || height < 14) return;
  write(
    pen,
    theme,
    value < 0.005 ? "·" : rounded(value),
    x + (width - gap) / 2,
    y + height / 2,
    "center",
    share > 0.6 ? "#000" : "ink",
  );
}

// ---- tiles ------------------------------------------------------------------------------------------------

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
