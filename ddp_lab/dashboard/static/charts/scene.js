// Paints the scenes that scene_json.py writes: their marks get pixels and colours, and become regions for the pointer
// and the keyboard. A role is the name of a colour of the page (readTheme), or else of the palette.

import { colourOf, fitEnd, pairsOf, tipOf, write } from "./pen.js";
import { ending, milliseconds, significant } from "./theme.js";
import { tiles } from "./tiles.js";

const RIGHT = 14;
const AXIS = 34;
const TEXTS = 90; // room at the ends of lying bars
const TICK = 44; // pixels between two numbers of an axis
// Upright panels: the numbers' room, the gap between two panels, the height of all, the widest column of a step.
const [LEFT, PANEL_GAP, UPRIGHT, WIDEST] = [58, 26, 280, 40];
const [LANE, LANES_LEFT, DOTS_LEFT] = [20, 210, 150];
// Cells: the room of the rows' names, the height of all, the highest row.
const [CELLS_LEFT, CELLS, HIGHEST] = [62, 220, 21];

const known = (value) => value !== null && value !== undefined;
const told = (value, unit) =>
  `${unit.startsWith("ms") ? milliseconds(value) : significant(value)} ${unit.split(" ")[0]}`.trim();

// Draws a scene on a ChartCanvas, if it is visible. how: {actions: {choose(step), select(bucket)}: a click, where an
// axis chooses something; shown: the step that the page shows; all: whether also the lanes that a reader asks for}.
export function drawScene(chart, { panels }, how) {
  if (!chart.hasRoom) return;
  const [first] = panels;
  const paint = { cells, tiles }[first.marks[0].kind] ?? (first.y.lanes.length ? lying : upright);
  const [height, draw] = paint(panels, { ...how, width: Math.floor(chart.node.clientWidth) });
  chart.finish(draw(chart.begin(height)));
}

// ---- upright ----------------------------------------------------------------------------------------------

// Steps that a scene names anywhere are columns, equally far from each other.
function upright(panels, { actions, shown }) {
  const { x: axis } = panels.at(-1);
  const places = ({ at, x }) => at ?? (Array.isArray(x) ? x : [x]);
  const steps = [...new Set(panels.flatMap(({ marks }) => marks.flatMap(places)))].sort((a, b) => a - b);
  const index = new Map(steps.map((step, place) => [step, place]));
  const spread = (mark, values, gap) => {
    const made = new Array(steps.length).fill(gap);
    places(mark).forEach((step, place) => (made[index.get(step)] = values[place] ?? gap));
    return made;
  };
  let bottom = (panels[0].marks.some(({ kind }) => kind === "rule") ? 26 : 10) - PANEL_GAP;
  const placed = panels.map((panel) => {
    const top = bottom + PANEL_GAP;
    const height = UPRIGHT * panel.share;
    bottom = top + height;
    const marks = panel.marks.map((mark) => ({
      ...mark,
      ...(mark.size && { size: spread(mark, mark.size, 0) }),
      ...(mark.y && { y: spread(mark, mark.y, null) }),
      ...(mark.low && { low: spread(mark, mark.low, null), high: spread(mark, mark.high, null) }),
      ...(mark.kind === "rule" && { x: index.get(mark.x) }),
    }));
    return { ...panel, marks, top, height, level: level(panel.y, top, height) };
  });
  const column = columnOf(axis, steps, placed, actions, shown);
  return [bottom + AXIS, (drawing) => paintPanels(drawing, placed, axis, steps.map(column), bottom)];
}

// What a step's column says and does.
function columnOf(axis, steps, panels, actions, shown) {
  const end = (place) => axis.ends[place] ?? steps[place];
  const lines = (place) => [
    end(place) > steps[place]
      ? `${axis.label}s ${steps[place].toLocaleString("en")}–${end(place).toLocaleString("en")} (medians)`
      : `${axis.label} ${steps[place].toLocaleString("en")}`,
    ...panels.flatMap((panel) => linesOf(panel, place)),
    ...pairsOf((axis.tips[place] ?? "").split("\n")),
  ];
  return (step, place) => ({
    key: `${axis.label} ${step}`,
    name: String(step),
    chosen:
      axis.marked === null ? axis.chooses === "step" && step <= shown && shown <= end(place) : step === axis.marked,
    lines: () => lines(place),
    act: axis.chooses === "step" && actions ? () => actions.choose(end(place)) : undefined,
  });
}

// The numbers of a panel at a place: bars from top to bottom below their sum, then lines.
function linesOf({ marks, total, y: { unit } }, place) {
  const bars = marks.filter(({ kind }) => kind === "bars").toReversed();
  const sum = bars.reduce((all, { size }) => all + size[place], 0);
  const line = ({ kind, name, low, high, y }) =>
    kind === "band"
      ? [name, known(low[place]) ? `${significant(low[place])} to ${told(high[place], unit)}` : "–"]
      : [name, told(y[place], unit)];
  return [
    ...(total && bars.length ? [[total, told(sum, unit)]] : []),
    ...bars.map(({ name, size }) => [name, told(size[place], unit)]),
    ...marks.filter(({ kind }) => kind === "line" || kind === "band").map(line),
  ];
}

function paintPanels(drawing, panels, axis, steps, bottom) {
  const { pen, width, theme } = drawing;
  const wide = Math.min((width - LEFT - RIGHT) / steps.length, WIDEST);
  const x = (index) => LEFT + (index + 0.5) * wide;
  for (const panel of panels) {
    paintScale(drawing, panel);
    paintBars(drawing, panel, steps, x, wide);
    for (const mark of panel.marks) PAINT[mark.kind]?.(drawing, panel, mark, x);
  }
  const [first] = panels;
  pen.fillStyle = theme.ink;
  steps.forEach(
    ({ chosen }, index) =>
      chosen && pen.fillRect(x(index) - wide / 2, first.top + first.height + 2, Math.max(wide - 1, 2), 3),
  );
  const every = Math.max(1, Math.ceil(56 / wide));
  steps.forEach(({ name }, index) => index % every === 0 && write(pen, theme, name, x(index), bottom + 12, "center"));
  const joined = axis.ends.length ? axis.ends[0] - Number(steps[0].name) + 1 : 1;
  write(pen, theme, joined > 1 ? `${axis.label} (each column: median of ${joined})` : axis.label, LEFT, bottom + 26);
  return steps.map((one, index) => ({
    ...one,
    x: x(index) - wide / 2,
    y: first.top,
    width: wide,
    height: bottom - first.top,
  }));
}

// From a value to a pixel.
function level({ low, top, log }, place, height) {
  const scale = log ? (value) => Math.log10(Math.max(value, low)) : (value) => Math.max(value, low);
  const [from, to] = [scale(low), scale(top)];
  return (value) => place + height * (1 - (scale(Math.min(value, top)) - from) / (to - from));
}

// Horizontal lines with their numbers, and what they measure.
function paintScale({ pen, width, theme }, { y: { label, ticks }, top, height, level: y }) {
  for (const [value, text] of ticks) {
    pen.fillStyle = theme.grid;
    pen.fillRect(LEFT, Math.round(y(value)), width - LEFT - RIGHT, 1);
    write(pen, theme, text, LEFT - 6, y(value), "right");
  }
  pen.save();
  pen.translate(10, top + height / 2);
  pen.rotate(-Math.PI / 2);
  write(pen, theme, label, 0, 0, "center");
  pen.restore();
}

function paintBars({ pen, theme }, { marks, level: y, top, y: { top: most } }, steps, x, wide) {
  const base = steps.map(() => 0);
  const stacked = marks.filter(({ kind }) => kind === "bars");
  for (const { size, role } of stacked) {
    pen.fillStyle = colourOf(role, theme);
    size.forEach((value, index) => {
      const upper = y(base[index] + value);
      pen.fillRect(x(index) - wide / 2, upper, Math.max(wide - (wide > 5 ? 1 : 0), 1), y(base[index]) - upper);
      base[index] += value;
    });
  }
  // Columns that exceed the scale.
  base.forEach((total, index) => stacked.length && total > most && paintArrow(pen, theme.ink, x(index), top + 1, 3));
}

function paintArrow(pen, colour, x, y, size) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x - size, y);
  pen.lineTo(x + size, y);
  pen.lineTo(x, y - 2 * size);
  pen.fill();
}

const PAINT = { line: paintLine, band: paintBand, rule: paintRule };

function paintBand({ pen, theme }, { level: y }, { low, high, role }, x) {
  const there = [...low.keys()].filter((index) => known(low[index]) && known(high[index]));
  pen.fillStyle = colourOf(role, theme);
  pen.globalAlpha = 0.35;
  pen.beginPath();
  for (const index of there) pen.lineTo(x(index), y(high[index]));
  for (const index of there.toReversed()) pen.lineTo(x(index), y(low[index]));
  pen.fill();
  pen.globalAlpha = 1;
}

function paintRule({ pen, theme }, { top, height }, { x: place, role, text }, x) {
  paintArrow(pen, colourOf(role, theme), x(place), top - 1, 4.5);
  pen.fillRect(x(place) - 0.75, top, 1.5, height);
  write(pen, theme, text, x(place), top - 16, "center", role);
}

function paintLine({ pen, theme }, { level: y }, { y: values, role, width, dash }, x) {
  pen.strokeStyle = pen.fillStyle = colourOf(role, theme);
  pen.lineWidth = width;
  pen.setLineDash(dash);
  pen.beginPath();
  values.forEach((value, index) => {
    if (!known(value)) return;
    if (index && known(values[index - 1])) pen.lineTo(x(index), y(value));
    else pen.moveTo(x(index), y(value));
  });
  pen.stroke();
  pen.setLineDash([]);
  if (values.length <= WIDEST)
    values.forEach((value, index) => known(value) && pen.fillRect(x(index) - 1.75, y(value) - 1.75, 3.5, 3.5));
}

// ---- lying ------------------------------------------------------------------------------------------------

function lying([panel], { all }) {
  const { x: axis, y, more } = panel;
  const count = more && !all ? 1 : y.lanes.length;
  const marks = panel.marks.map((mark) => onlyLanes(mark, count));
  const kinds = new Set(marks.map(({ kind }) => kind));
  const names = y.lanes.slice(0, count).map((name, at) => (y.notes[at] ? `${name}: ${y.notes[at]}` : name));
  const dots = marks.filter(({ kind }) => kind === "dots");
  const height = kinds.has("bars") ? 26 : !dots.length ? LANE : dots.some(({ spread }) => spread) ? 54 : 15;
  const most = kinds.has("bars") ? LANES_LEFT : dots.length ? DOTS_LEFT : 0;
  const left = most ? Math.min(most, 16 + 7 * Math.max(...y.lanes.map((name) => name.length))) : LANES_LEFT;
  const keys = dots.filter(({ name }) => name);
  const head = keys.length ? 18 : 0;
  const bottom = head + count * height;
  return [
    bottom + AXIS,
    (drawing) => {
      const { pen, width, theme } = drawing;
      const right = kinds.has("bars") ? TEXTS : RIGHT;
      const x = (value) =>
        left + ((Math.min(value, axis.top) - axis.low) / (axis.top - axis.low)) * (width - left - right);
      const middle = (lane) => head + (lane + 0.5) * height;
      paintKeys(pen, theme, keys, left, width);
      paintTicks(pen, theme, axis, x, head, bottom);
      write(pen, theme, axis.label, (left + width - right) / 2, bottom + 24, "center");
      names.forEach((name, lane) => {
        const strong = y.headings.includes(lane) || (more && lane === 0);
        const font = `${strong ? "600 " : ""}${height < 20 ? 11 : 12}px`;
        pen.font = `${font} ${theme.font}`;
        write(pen, theme, fitEnd(pen, name, left - 12), left - 7, middle(lane), "right", "ink", font);
      });
      const whole = names.flatMap((name, lane) =>
        y.tips[lane]
          ? [{ key: name, lines: () => tipOf(y.tips[lane]), x: 0, y: head + lane * height, width, height }]
          : [],
      );
      const inside = paintLying(drawing, { ...panel, marks }, x, middle, height);
      return [...whole, ...inside.sort((a, b) => a.y - b.y || a.x - b.x)];
    },
  ];
}

// The marks of the first lanes alone.
function onlyLanes(mark, count) {
  const lane = mark.lane ?? mark.at;
  if (!lane || lane.every((one) => one < count)) return mark;
  const kept = (values) => (values?.length === lane.length ? values.filter((_, index) => lane[index] < count) : values);
  return Object.fromEntries(
    Object.entries(mark).map(([name, values]) => [name, Array.isArray(values) ? kept(values) : values]),
  );
}

function paintKeys(pen, theme, keys, left, width) {
  keys.forEach(({ name, role, shape }, index) => {
    const at = left + 62 * index;
    if (at > width - 60) return;
    paintShape(pen, colourOf(role, theme), shape, at + 4, 8);
    write(pen, theme, name, at + 12, 8);
  });
}

function paintTicks(pen, theme, { ticks }, x, head, bottom) {
  if (!ticks.length) return;
  const apart = ticks.length > 1 ? x(ticks[1][0]) - x(ticks[0][0]) : TICK;
  const every = Math.max(1, Math.ceil(TICK / apart));
  ticks.forEach(([value, text], index) => {
    if (index % every) return;
    pen.fillStyle = theme.grid;
    pen.fillRect(Math.round(x(value)), head, 1, bottom - head);
    write(pen, theme, text, x(value), bottom + 9, "center");
  });
}

function paintLying({ pen, theme }, { marks, x: axis, y, total }, x, middle, height) {
  const ends = y.lanes.map(() => 0);
  const bars = marks.filter(({ kind }) => kind === "bars");
  for (const { at, size } of bars) at.forEach((lane, index) => (ends[lane] += size[index] ?? 0));
  const base = y.lanes.map(() => 0);
  return marks.flatMap((mark) => {
    pen.fillStyle = colourOf(mark.role, theme);
    if (mark.kind === "dots") return paintDots(pen, mark, x, middle, height);
    if (mark.kind === "spans") return paintSpans(pen, mark, x, middle, height - 6);
    return mark.at.map((lane, index) => {
      const begin = base[lane];
      base[lane] += mark.size[index] ?? 0;
      const box = boxOf(x(begin), x(base[lane]), middle(lane), height - 6);
      pen.fillStyle = colourOf(mark.role, theme);
      pen.fillRect(box.x, box.y, box.width, box.height);
      if (mark.texts[index])
        write(pen, theme, mark.texts[index], x(base[lane]) + 6, middle(lane), "left", "ink", "12px");
      const lines = () =>
        mark.tips.length
          ? tipOf(mark.tips[index])
          : [
              y.lanes[lane],
              [mark.name, told(mark.size[index], axis.unit)],
              ...(total ? [[total, told(ends[lane], axis.unit)]] : []),
            ];
      return { ...box, key: `${lane} ${mark.role}`, lines };
    });
  });
}

const boxOf = (begin, end, middle, high) => ({ x: begin, y: middle - high / 2, width: end - begin, height: high });

function paintSpans(pen, { name, lane, begin, end, thin, tips }, x, middle, high) {
  return lane.flatMap((one, index) => {
    const tall = thin ? Math.max(2, Math.round(high / 4)) : high; // at the lower edge
    const at = middle(one) + (high - tall) / 2;
    const box = boxOf(x(begin[index]), Math.max(x(end[index]), x(begin[index]) + 1.5), at, tall);
    pen.fillRect(box.x, box.y, box.width, box.height);
    if (!tips.length) return [];
    return [{ ...box, key: `${one} ${name} ${begin[index]}`, lines: () => tipOf(tips[index] ?? name) }];
  });
}

function paintDots(pen, { shape, x: values, lane, spread }, x, middle, height) {
  const size = spread ? 2.4 : 4;
  const [count, seen] = [new Map(), new Map()];
  for (const one of lane) count.set(one, (count.get(one) ?? 0) + 1);
  lane.forEach((one, index) => {
    const place = seen.get(one) ?? 0;
    seen.set(one, place + 1);
    if (!known(values[index])) return;
    const below = spread ? (0.5 - (place + 0.5) / count.get(one)) * (height - 16) : 0;
    paintShape(pen, pen.fillStyle, shape, x(values[index]), middle(one) + below, size);
  });
  return [];
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

// ---- cells ------------------------------------------------------------------------------------------------

const CHOOSES = {
  step: (actions, axis, place) => actions.choose(Number(axis.lanes[place])),
  bucket: (actions, _, place) => actions.select(place),
};

// Larger values have a stronger colour; columns narrower than a pixel are joined to their maximum.
function cells(panels, { actions }) {
  const rows = panels[0].y.lanes.length;
  const high = Math.min(Math.max(Math.floor(CELLS / rows), 5), HIGHEST);
  const heads = panels.map(({ heading }) => (heading ? 20 : 2));
  const each = high * rows + AXIS;
  return [
    heads.reduce((sum, head) => sum + head + each, 0),
    (drawing) => {
      let top = 0;
      return panels.flatMap((panel, index) => {
        if (panel.heading) write(drawing.pen, drawing.theme, panel.heading, 4, top + 9, "left", "ink", "600 11.5px");
        const regions = paintGrid(drawing, panel, actions, top + heads[index], high);
        top += heads[index] + each;
        return regions;
      });
    },
  ];
}

function paintGrid({ pen, width, theme }, { x: axis, y, marks: [cells] }, actions, top, high) {
  const count = axis.lanes.length;
  const join = Math.max(1, Math.ceil(count / (width - CELLS_LEFT - RIGHT)));
  const columns = Math.ceil(count / join);
  const wide = Math.min((width - CELLS_LEFT - RIGHT) / Math.max(columns, 1), 64);
  const last = (column) => Math.min((column + 1) * join, count) - 1;
  const values = cells.values.map((row) =>
    Array.from({ length: columns }, (_, column) =>
      row.slice(column * join, last(column) + 1).reduce((best, one) => Math.max(best, one ?? 0), 0),
    ),
  );
  const largest = values.reduce((most, row) => row.reduce((best, one) => Math.max(best, one), most), 0);
  const gap = wide > 6 && high > 6 ? 1 : 0;
  const act = actions && CHOOSES[axis.chooses];
  const regions = values.flatMap((row, index) => {
    const below = top + index * high;
    if (index % Math.ceil(12 / high) === 0)
      write(pen, theme, y.lanes[index], CELLS_LEFT - 6, below + high / 2, "right");
    return row.map((value, column) => {
      const box = { x: CELLS_LEFT + column * wide, y: below, width: wide, height: high };
      paintCell(pen, theme, value, largest > 0 ? value / largest : 0, box, gap);
      const [from, to] = [column * join, last(column)];
      const until = to > from ? ` – ${axis.lanes[to]}` : "";
      return {
        ...box,
        key: `${axis.label} ${index} ${column}`,
        lines: () => [
          `${y.lanes[index]} · ${axis.label} ${axis.lanes[from]}${until}`,
          ...(cells.others.length
            ? cells.others.map(([name, of]) => [name, significant((Array.isArray(of[index]) ? of[index] : of)[from])])
            : [[cells.name, told(value, cells.unit)]]),
        ],
        act: act && (() => act(actions, axis, to)),
      };
    });
  });
  const bottom = top + values.length * high;
  const names = Array.from({ length: columns }, (_, column) => ending(axis.lanes[column * join]));
  const room = Math.max(40, 8 + 6 * Math.max(...names.map((name) => name.length)));
  for (let column = 0; column < columns; column += Math.max(1, Math.ceil(room / wide)))
    write(pen, theme, names[column], CELLS_LEFT + (column + 0.5) * wide, bottom + 9, "center");
  const joined = join > 1 ? `; each column: the largest of ${join}` : "";
  write(pen, theme, `${axis.label}${joined}; full colour: ${rounded(largest)} ${cells.unit}`, CELLS_LEFT, bottom + 24);
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
