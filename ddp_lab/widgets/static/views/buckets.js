// Buckets: which parameters travel together, as a map of the model; sizes, order of readiness, what is unused.

import { RAMP } from "../generated.js";
import { ChartCanvas, median } from "../charts/canvas.js";
import { element, fill, makeTable, setText } from "../charts/dom.js";
import { mapCells } from "../charts/model_map.js";
import { bytes, count, milliseconds } from "../charts/theme.js";
import { EDGE, EDGES } from "../steps/lanes.js";
import { ReconfigureForm } from "./reconfigure.js";

const ROW = 34;
const STRIP = 24;
// RAMP reads the same with every kind of colour vision; the buckets' order is its order. On dark paper its dark end would look like a hole: this one begins where it is seen, and is as ordered.
const RAMP_ON_DARK = [[84, 121, 184], [108, 132, 170], [126, 140, 152], [146, 148, 138], [172, 164, 120], [213, 194, 100], [255, 233, 69]];
const TABLE = ["bucket", "size", "parameters", "ready at ms", "reduced at ms", "dtype", "device", "holds"];

export function bucketColour(bucket, buckets, dark) {
  const ramp = dark ? RAMP_ON_DARK : RAMP;
  const at = (buckets < 2 ? 0.5 : bucket / (buckets - 1)) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  const [r, g, b] = ramp[low].map((value, index) => Math.round(value + (ramp[low + 1][index] - value) * (at - low)));
  return { fill: `rgb(${r}, ${g}, ${b})`, ink: 0.3 * r + 0.59 * g + 0.11 * b > 120 ? "#000" : "#fff" };
}

export class BucketsView {
  // actions: {select(bucket), send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.root = "";
    this.facts = element("div", { class: "ddp-summary" });
    this.chart = new ChartCanvas("Map of the model: modules, their parameters and the bucket of each", actions);
    this.width = choice("width of a parameter", [["bytes", "its bytes"], ["equal", "all the same"]], () => actions.redraw());
    this.up = button("whole model", null, () => this.zoom(""));
    this.form = new ReconfigureForm(actions);
    this.table = makeTable("Buckets, in the order in which they are launched", TABLE);
    const bar = element("div", { class: "ddp-toolbar" }, field("width", this.width), this.up);
    this.node = section("buckets", "buckets", "Buckets", this.facts, this.form.node, bar, this.chart.node, scrolled("table of buckets", this.table.node));
  }

  zoom(path) {
    this.root = path;
    this.actions.redraw();
  }

  // readiness: of the kernel: {generation, ready: [ms by parameter], used: [share by parameter]} or undefined
  // controls: {model, current, control, reconfiguration, means}: for the form
  draw(record, assignment, selected, readiness, controls) {
    this.form.draw(controls.model, controls.current, controls.control, controls.reconfiguration, controls.means.control);
    this.chart.node.hidden = !assignment;
    if (!assignment) return setText(this.facts, "The ranks have not said yet which parameters the buckets hold.");
    const known = readiness?.generation === assignment.generation ? readiness : undefined;
    setText(this.facts, describe(assignment, known));
    this.up.hidden = !this.root;
    fill(this.table.body, assignment.buckets.map((one) => line(record, assignment, one)));
    [...this.table.body.rows].forEach((row, index) => {
      row.classList.toggle("ddp-selected", assignment.buckets[index].bucket === selected);
      row.onclick = () => this.actions.select(assignment.buckets[index].bucket);
    });
    const options = { root: this.root, equal: this.width.value === "equal" };
    const { cells, depth } = mapCells(assignment, options);
    const rows = Math.min(depth, 9);
    const drawing = this.chart.begin(rows * ROW + STRIP + 22);
    if (drawing) this.chart.finish([...this.paintMap(drawing, assignment, cells, rows, selected, known), ...this.paintStrip(drawing, assignment, rows * ROW + 20, selected)]);
  }

  paintMap({ pen, width, theme }, assignment, cells, rows, selected, known) {
    const regions = [];
    const painted = new Array(rows + 1).fill(-1); // right edge of what was drawn in each row
    for (const cell of cells) {
      if (cell.depth >= rows) continue;
      const x = cell.begin * (width - 2) + 1;
      const wide = (cell.end - cell.begin) * (width - 2);
      if (x + wide < painted[cell.depth] + 0.5) continue; // narrower than a pixel, and that pixel is taken
      painted[cell.depth] = x + Math.max(wide, 1);
      const y = cell.depth * ROW;
      const high = (cell.parameter < 0 ? 1 : Math.min(cell.rows, rows - cell.depth)) * ROW;
      const unused = cell.parameter >= 0 && known?.used[cell.parameter] === 0;
      const colour = cell.bucket < 0 ? { fill: theme.panel, ink: theme.ink } : bucketColour(cell.bucket, assignment.buckets.length, theme.dark);
      pen.fillStyle = colour.fill;
      pen.globalAlpha = cell.parameter < 0 && cell.bucket >= 0 ? 0.75 : 1;
      pen.fillRect(x, y, Math.max(wide - (wide > 4 ? 1 : 0), 1), high - 1);
      pen.globalAlpha = 1;
      if (wide > 6) frame(pen, theme, x, y, wide - 1, high - 1);
      if (unused) hatch(pen, x, y, wide - 1, high - 1, colour.ink);
      pen.fillStyle = colour.ink;
      pen.textAlign = "left";
      pen.font = `${cell.parameter < 0 ? "600 " : ""}11px ${theme.font}`;
      const name = layerName(cell.name);
      const label = cell.parameter < 0 ? name : `${name} · ${unused ? "unused" : `b${cell.bucket}`}`;
      writeClipped(pen, [label, name, cell.parameter < 0 ? cell.name : `b${cell.bucket}`], x + 4, y + Math.min(high, ROW) / 2, wide - 8);
      if (cell.parameter >= 0 && cell.bucket === selected) outline(pen, theme, x, y, wide - 1, high - 1);
      const act = cell.parameter < 0 ? () => this.zoom(cell.path === this.root ? "" : cell.path) : () => this.actions.select(cell.bucket);
      regions.push({ key: `cell ${cell.path}`, x, y, width: Math.max(wide, 1), height: high, lines: () => cellLines(cell, assignment, known), act });
    }
    return regions;
  }

  // All buckets in order of launch, as wide as they are large.
  paintStrip({ pen, width, theme }, assignment, top, selected) {
    const total = assignment.buckets.reduce((sum, one) => sum + one.bytes, 0) || 1;
    pen.font = `11px ${theme.font}`;
    pen.textAlign = "left";
    pen.fillStyle = theme.muted;
    pen.fillText("buckets, first launched first; as wide as their bytes", 2, top - 9);
    let x = 1;
    return assignment.buckets.map((one) => {
      const wide = (one.bytes / total) * (width - 2);
      const colour = bucketColour(one.bucket, assignment.buckets.length, theme.dark);
      pen.fillStyle = colour.fill;
      pen.fillRect(x, top, Math.max(wide - (wide > 4 ? 1 : 0), 1), STRIP);
      pen.fillStyle = colour.ink;
      writeClipped(pen, [`bucket ${one.bucket} · ${bytes(one.bytes)}`, `b${one.bucket}`], x + 4, top + STRIP / 2, wide - 8);
      if (one.bucket === selected) outline(pen, theme, x, top, wide - 1, STRIP);
      const region = { key: `bucket ${one.bucket}`, x, y: top, width: Math.max(wide, 1), height: STRIP, lines: () => [`bucket ${one.bucket}`, ["size", bytes(one.bytes)], ["parameters", String(one.parameters.length)], ["dtype", one.dtype], ["device", one.device]], act: () => this.actions.select(one.bucket) };
      x += wide;
      return region;
    });
  }
}

// Modules of a Sequential are called by numbers.
function layerName(name) {
  return /^\d+$/.test(name) ? `layer ${name}` : name;
}

function hatch(pen, x, y, width, height, colour) {
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

// Seen where the colour is near that of the page.
function frame(pen, theme, x, y, width, height) {
  pen.strokeStyle = theme.muted;
  pen.globalAlpha = 0.35;
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  pen.globalAlpha = 1;
}

function outline(pen, theme, x, y, width, height) {
  pen.strokeStyle = theme.paper;
  pen.lineWidth = 4;
  pen.strokeRect(x + 2, y + 2, Math.max(width - 4, 1), height - 4);
  pen.strokeStyle = theme.ink;
  pen.lineWidth = 2;
  pen.strokeRect(x + 1, y + 1, Math.max(width - 2, 1), height - 2);
}

// The first of the texts that fits.
function writeClipped(pen, texts, x, y, room) {
  const fitting = texts.find((text) => pen.measureText(text).width <= room);
  if (fitting) pen.fillText(fitting, x, y);
}

function cellLines(cell, assignment, known) {
  if (cell.parameter < 0) {
    const inside = assignment.parameters.filter((one) => !cell.path || one.name.startsWith(`${cell.path}.`));
    const total = inside.reduce((sum, one) => sum + one.bytes, 0);
    return [cell.path || assignment.module, ["parameters", String(inside.length)], ["size", bytes(total)], ["bucket", cell.bucket < 0 ? "several" : String(cell.bucket)]];
  }
  const parameter = assignment.parameters.find((one) => one.index === cell.parameter);
  const lines = [parameter.name, ["bucket", cell.bucket < 0 ? "none" : String(cell.bucket)], ["size", bytes(parameter.bytes)], ["shape", parameter.shape.join(" × ") || "scalar"], ["dtype", `${parameter.dtype} on ${parameter.device}`]];
  if (known) {
    const used = known.used[cell.parameter];
    lines.push(["gradient ready at", used > 0 ? `${milliseconds(known.ready[cell.parameter])} ms` : "never: unused"]);
    if (used > 0 && used < 1) lines.push(["used in", `${Math.round(100 * used)} % of the steps`]);
  }
  return lines;
}

function line(record, assignment, one) {
  const names = one.parameters.map((index) => assignment.parameters[index].name);
  const column = (which) => milliseconds(median(record.ranks.map((_, row) => record.edges[(row * record.buckets + one.bucket) * EDGES + which] - record.bounds[row * 3])));
  const here = record.generation === assignment.generation && one.bucket < record.buckets;
  const more = names.length > 2 ? ` and ${names.length - 2} more` : "";
  return [String(one.bucket), bytes(one.bytes), String(names.length), here ? column(EDGE.READY) : "–", here ? column(EDGE.REDUCED) : "–", one.dtype, one.device, names.slice(0, 2).join(", ") + more];
}

function describe(assignment, known) {
  const total = assignment.buckets.reduce((sum, one) => sum + one.bytes, 0);
  const parts = [`${count(assignment.parameters.length, "parameter")} in ${count(assignment.buckets.length, "bucket")}, ${bytes(total)} a step`];
  parts.push(assignment.rebuilt ? "rebuilt in the order in which gradients became ready" : "not rebuilt (yet): in reverse order of registration");
  const caps = assignment.options?.bucket_cap_mb_list ?? [assignment.options?.bucket_cap_mb];
  if (typeof caps[0] === "number") parts.push(`caps ${[...new Set(caps)].map((cap) => Number(cap.toPrecision(3))).join(", ")} MiB`);
  const kinds = [...new Set(assignment.buckets.map((one) => `${one.dtype} on ${one.device}`))];
  parts.push(kinds.slice(0, 3).join(", "));
  const unused = known ? assignment.parameters.filter((one) => known.used[one.index] === 0).map((one) => one.name) : [];
  if (known) parts.push(unused.length ? `unused: ${unused.slice(0, 3).join(", ")}${unused.length > 3 ? ` and ${unused.length - 3} more` : ""}` : "every parameter is used");
  return `${parts.join(" · ")}.`;
}
