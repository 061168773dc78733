// Buckets: the bucket layout as a map of the model; sizes, order of readiness, unused parameters.

import { ChartCanvas, median } from "../charts/canvas.js";
import { button, choice, element, field, fill, makeTable, scrolled, section, setText } from "../charts/dom.js";
import { write } from "../charts/pen.js";
import { bucketColour, bytes, count, milliseconds } from "../charts/theme.js";
import { paintTiles } from "../charts/tiles.js";
import { EDGE, EDGES } from "../steps/lanes.js";
import { ReconfigureForm } from "./reconfigure.js";

const ROW = 34;
const STRIP = 24;
const TABLE = ["bucket", "size", "parameters", "ready at ms", "reduced at ms", "dtype", "device", "holds"];

export class BucketsView {
  // actions: {select(bucket), send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.root = "";
    this.facts = element("div", { class: "ddp-summary" });
    this.chart = new ChartCanvas("Map of the model: modules, their parameters and the bucket of each", actions);
    this.width = choice(
      "width of a parameter",
      [
        ["bytes", "by bytes"],
        ["equal", "all equal"],
      ],
      () => actions.redraw(),
    );
    this.up = button("whole model", null, () => this.zoom(""));
    this.form = new ReconfigureForm(actions);
    this.table = makeTable("Buckets", TABLE);
    const bar = element("div", { class: "ddp-toolbar" }, field("width", this.width), this.up);
    this.node = section(
      "buckets",
      "buckets",
      "Buckets",
      this.facts,
      this.form.node,
      bar,
      this.chart.node,
      scrolled("table of buckets", this.table.node),
    );
  }

  forgetTheme() {
    this.form.blocks.forgetTheme();
  }

  zoom(path) {
    this.root = path;
    this.actions.redraw();
  }

  // readiness: from the kernel: {generation, ready: [ms by parameter], used: [share by parameter]} or undefined
  // controls: {model, current, control, reconfiguration, means}: for the form
  draw(record, assignment, selected, readiness, controls) {
    this.form.draw(
      controls.model,
      controls.current,
      controls.control,
      controls.reconfiguration,
      controls.means.control,
    );
    this.chart.node.hidden = !assignment;
    if (!assignment) return setText(this.facts, "Bucket layout not received yet.");
    const { words } = controls;
    setText(this.table.node.caption, `${words.title}s, ${words.order}`);
    setText(this.table.cells[0], words.column);
    this.table.cells[0].classList.toggle("ddp-words", words.named);
    const known = readiness?.generation === assignment.generation ? readiness : undefined;
    setText(this.facts, describe(assignment, known, words));
    this.up.hidden = !this.root;
    fill(
      this.table.body,
      assignment.buckets.map((one) => line(record, assignment, one, words)),
    );
    [...this.table.body.rows].forEach((row, index) => {
      row.cells[0].classList.toggle("ddp-words", words.named);
      row.classList.toggle("ddp-selected", assignment.buckets[index].bucket === selected);
      row.onclick = () => this.actions.select(assignment.buckets[index].bucket);
    });
    const options = { root: this.root, equal: this.width.value === "equal" };
    const { cells, depth } = mapCells(assignment, options);
    const rows = Math.min(depth, 9);
    const drawing = this.chart.begin(rows * ROW + STRIP + 22);
    if (drawing)
      this.chart.finish(
        paintTiles(drawing, [
          ...this.mapTiles(drawing, assignment, cells, rows, selected, known, words),
          ...this.stripTiles(drawing, assignment, rows * ROW + 20, selected, words),
        ]),
      );
  }

  mapTiles({ width, theme }, assignment, cells, rows, selected, known, words) {
    const painted = new Array(rows + 1).fill(-1); // right edge of what was drawn in each row
    return cells.flatMap((cell) => {
      const x = cell.begin * (width - 2) + 1;
      const wide = (cell.end - cell.begin) * (width - 2);
      // Skips a cell narrower than a pixel if that pixel is already painted.
      if (cell.depth >= rows || x + wide < painted[cell.depth] + 0.5) return [];
      painted[cell.depth] = x + Math.max(wide, 1);
      const height = Math.min(cell.rows, rows - cell.depth) * ROW;
      const own =
        cell.parameter < 0 ? this.ofModule(cell) : this.ofParameter(cell, selected, known?.used[cell.parameter], words);
      return [
        {
          ...tile(cell.bucket, x, cell.depth * ROW, wide, height, 1, assignment, theme),
          key: `cell ${cell.path}`,
          edge: 0.35,
          lines: () => cellLines(cell, assignment, known, words),
          ...own,
        },
      ];
    });
  }

  ofModule(cell) {
    return {
      alpha: cell.bucket < 0 ? 1 : 0.75,
      font: "600 11px",
      texts: [layerName(cell.name), cell.name],
      act: () => this.zoom(cell.path === this.root ? "" : cell.path),
    };
  }

  // used: in which share of the steps, undefined if it is not known
  ofParameter(cell, selected, used, words) {
    const name = layerName(cell.name);
    const tags = used === 0 ? ["unused"] : words.tags(cell.bucket);
    return {
      hatched: used === 0,
      font: "11px",
      texts: [[name, ...tags].join(" · "), name, ...tags],
      chosen: cell.bucket === selected,
      act: () => this.actions.select(cell.bucket),
    };
  }

  // All buckets in launch order, with width by size.
  stripTiles({ pen, width, theme }, assignment, top, selected, words) {
    const total = assignment.buckets.reduce((sum, one) => sum + one.bytes, 0) || 1;
    write(pen, theme, `${words.unit}s ${words.order}; width by bytes`, 2, top - 9);
    let x = 1;
    return assignment.buckets.map((one) => {
      const wide = (one.bytes / total) * (width - 2);
      x += wide;
      return {
        ...tile(one.bucket, x - wide, top, wide, STRIP, 0, assignment, theme),
        key: `bucket ${one.bucket}`,
        texts: [`${words.name(one.bucket)} · ${bytes(one.bytes)}`, words.short(one.bucket)],
        chosen: one.bucket === selected,
        lines: () => [
          words.name(one.bucket),
          ["size", bytes(one.bytes)],
          ["parameters", String(one.parameters.length)],
          ["dtype", one.dtype],
          ["device", one.device],
        ],
        act: () => this.actions.select(one.bucket),
      };
    });
  }
}

// The map's cells from left to right: those of model_map.py, or those inside one of them.
// [{depth, rows, begin, end, name, path, parameter: index | -1, bucket: its only bucket | -1}] with
// 0 ≤ begin < end ≤ 1, and the number of rows. `root`: path of the module that fills the width; `equal`: all parameters
// have the same width.
export function mapCells({ cells }, { root = "", equal = false } = {}) {
  const all = cells.map(([name, path, parameter, bucket, depth, ...edges]) => ({
    name,
    path,
    parameter,
    bucket,
    depth,
    begin: edges[equal ? 2 : 0],
    end: edges[equal ? 3 : 1],
  }));
  const top = all.find((one) => one.path === root) ?? all[0];
  const inside = all.filter((one) => one === top || !top.path || one.path.startsWith(`${top.path}.`));
  const depth = 1 + Math.max(...inside.map((one) => one.depth)) - top.depth;
  const scale = 1 / (top.end - top.begin || 1);
  const made = inside.map((one) => {
    const level = one.depth - top.depth;
    return {
      ...one,
      depth: level,
      rows: one.parameter < 0 ? 1 : depth - level,
      begin: (one.begin - top.begin) * scale,
      end: (one.end - top.begin) * scale,
    };
  });
  return { cells: made, depth };
}

function tile(bucket, x, y, width, height, below, assignment, theme) {
  const colour =
    bucket < 0 ? { fill: theme.panel, ink: theme.ink } : bucketColour(bucket, assignment.buckets.length, theme.dark);
  return { x, y, width, height, gap: [width > 4 ? 1 : 0, below], colour };
}

// Modules of a Sequential have numbers for names.
function layerName(name) {
  return /^\d+$/.test(name) ? `layer ${name}` : name;
}

function cellLines(cell, assignment, known, words) {
  if (cell.parameter < 0) {
    const inside = assignment.parameters.filter((one) => !cell.path || one.name.startsWith(`${cell.path}.`));
    const total = inside.reduce((sum, one) => sum + one.bytes, 0);
    return [
      cell.path || assignment.module,
      ["parameters", String(inside.length)],
      ["size", bytes(total)],
      [words.unit, cell.bucket < 0 ? "several" : words.cell(cell.bucket)],
    ];
  }
  const parameter = assignment.parameters.find((one) => one.index === cell.parameter);
  const lines = [
    parameter.name,
    [words.unit, cell.bucket < 0 ? "none" : words.cell(cell.bucket)],
    ["size", bytes(parameter.bytes)],
    ["shape", parameter.shape.join(" × ") || "scalar"],
    ["dtype", `${parameter.dtype} on ${parameter.device}`],
  ];
  if (known) {
    const used = known.used[cell.parameter];
    lines.push(["gradient ready at", used > 0 ? `${milliseconds(known.ready[cell.parameter])} ms` : "never: unused"]);
    if (used > 0 && used < 1) lines.push(["used in", `${Math.round(100 * used)} % of the steps`]);
  }
  return lines;
}

function line(record, assignment, one, words) {
  const names = one.parameters.map((index) => assignment.parameters[index].name);
  const column = (which) =>
    milliseconds(
      median(
        record.ranks.map(
          (_, row) => record.edges[(row * record.buckets + one.bucket) * EDGES + which] - record.bounds[row * 3],
        ),
      ),
    );
  const here = record.generation === assignment.generation && one.bucket < record.buckets;
  const more = names.length > 2 ? ` and ${names.length - 2} more` : "";
  return [
    words.cell(one.bucket),
    bytes(one.bytes),
    String(names.length),
    here ? column(EDGE.READY) : "–",
    here ? column(EDGE.REDUCED) : "–",
    one.dtype,
    one.device,
    names.slice(0, 2).join(", ") + more,
  ];
}

function describe(assignment, known, words) {
  const total = assignment.buckets.reduce((sum, one) => sum + one.bytes, 0);
  const parts = [
    `${count(assignment.parameters.length, "parameter")} in ${words.counted}, ${bytes(total)} per step`,
    words.arranged,
  ];
  const caps = assignment.options?.bucket_cap_mb_list ?? [assignment.options?.bucket_cap_mb];
  if (typeof caps[0] === "number")
    parts.push(`size limit ${[...new Set(caps)].map((cap) => Number(cap.toPrecision(3))).join(", ")} MiB`);
  const kinds = [...new Set(assignment.buckets.map((one) => `${one.dtype} on ${one.device}`))];
  parts.push(kinds.slice(0, 3).join(", "));
  const unused = known ? assignment.parameters.filter((one) => known.used[one.index] === 0).map((one) => one.name) : [];
  if (known)
    parts.push(
      unused.length
        ? `unused: ${unused.slice(0, 3).join(", ")}${unused.length > 3 ? ` and ${unused.length - 3} more` : ""}`
        : "every parameter is used",
    );
  return `${parts.join(" · ")}.`;
}
