// Lanes over the time, with a table: collectives by process group, and parameter groups in one step.

import { ChartCanvas } from "../charts/canvas.js";
import { element, fill, legend, makeTable, section, setText } from "../charts/dom.js";
import { COLOURS } from "../generated.js";
import { drawScene } from "../charts/scene.js";

const HEAD = ["group", "backend", "operations", "bytes", "last rank", "last, %", "late ms", "in flight ms", "GB/s (bus)"];
const TIMES = ["all-gather (forward) ms", "all-gather (backward) ms", "reduce-scatter ms", "all-reduce ms"];
const GROUP_HEAD = ["module", "rank", ...TIMES.flatMap((name) => [name, "of it exposed"]), "late", "whole", "held"];
const [LANE, LEFT] = [20, 210];

class LanesView {
  // actions: {redraw(), say(text)}; title: of the view; empty: what it says while the kernel has found nothing
  constructor(actions, name, about, title, caption, head, empty) {
    this.title = title;
    this.empty = empty;
    this.words = element("div", { class: "ddp-summary", role: "status" });
    this.keys = element("div");
    this.chart = new ChartCanvas(`${title} (ms)`, actions);
    this.table = makeTable(caption, head);
    const scroll = element("div", { class: "ddp-table-scroll" }, this.table.node);
    this.node = section(name, about, title, this.words, this.keys, this.chart.node, scroll);
  }

  // found: from the kernel, see groups_trait and parameter_groups_trait; {} before its first answer
  draw(found) {
    const lanes = found?.lanes ?? [];
    if (!lanes.length) {
      setText(this.words, found?.lanes ? (found.words?.[0] ?? this.empty) : "Waiting for the kernel.");
      for (const node of [this.keys, this.chart.node, this.table.node]) node.hidden = true;
      this.shown = null;
      return;
    }
    for (const node of [this.keys, this.chart.node, this.table.node]) node.hidden = false;
    if (found !== this.shown) this.write(found);
    this.shown = found;
    drawScene(this.chart, () => scene(found));
  }

  write(found) {
    this.words.replaceChildren(...found.words.map((text) => element("div", {}, text)));
    this.keys.replaceChildren(legend("legend", found.keys.map(([role, name]) => [name, `background: ${COLOURS[role]}`])));
    this.chart.label(`${this.title}. ${found.words.join(" ")}`);
    fill(this.table.body, found.table);
  }
}

export class GroupsView extends LanesView {
  constructor(actions) {
    super(actions, "groups", "collectives by process group", "Collectives by group", "Process groups", HEAD, "No collective has been recorded yet.");
  }
}

export class ParameterGroupsView extends LanesView {
  constructor(actions) {
    super(actions, "parameter_groups", "parameter groups of fully_shard and replicate", "Parameter groups", "Medians by group and rank", GROUP_HEAD, "");
  }
}

function scene({ lanes, spans, keys, tips }) {
  return {
    lanes: lanes.map(([name, note, strong]) => ({ name: note && !strong ? `${name}: ${note}` : name, strong })),
    height: LANE,
    left: LEFT,
    label: "milliseconds",
    top: Math.max(...spans.map(([, , end]) => end), 1e-3),
    marks: [{ boxes: spans.map(([lane, begin, end, key, tip, thin]) => ({ lane, begin, end, thin, role: keys[key][0], key: `${lane} ${key} ${tip}`, lines: () => tooltip(tips[tip]) })) }],
  };
}

// The first line is a title; the others are texts alone.
function tooltip([title, ...lines]) {
  return [title, ...lines.map((line) => ["", line])];
}
