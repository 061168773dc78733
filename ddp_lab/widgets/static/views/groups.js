// Collectives by group: a lane for each rank of each process group, over the newest time.

import { ChartCanvas } from "../charts/canvas.js";
import { element, fill, legend, makeTable, section, setText } from "../charts/dom.js";
import { COLOURS } from "../generated.js";
import { drawScene } from "../charts/scene.js";

const HEAD = ["group", "backend", "operations", "bytes", "last rank", "last, %", "late ms", "in flight ms", "GB/s (bus)"];
const [LANE, LEFT] = [20, 210];

export class GroupsView {
  // actions: {redraw(), say(text)}
  constructor(actions) {
    this.words = element("div", { class: "ddp-summary", role: "status" });
    this.keys = element("div");
    this.chart = new ChartCanvas("Collectives by group (ms)", actions);
    this.table = makeTable("Process groups", HEAD);
    const scroll = element("div", { class: "ddp-table-scroll" }, this.table.node);
    this.node = section("groups", "collectives by process group", "Collectives by group", this.words, this.keys, this.chart.node, scroll);
  }

  // found: from the kernel, see groups_trait in groups.py; {} before its first answer
  draw(found) {
    const lanes = found?.lanes ?? [];
    if (!lanes.length) {
      setText(this.words, found?.lanes ? "No collective has been recorded yet." : "Waiting for the kernel.");
      for (const node of [this.keys, this.chart.node, this.table.node]) node.hidden = true;
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
    this.chart.label(`Collectives by group. ${found.words.join(" ")}`);
    fill(this.table.body, found.table);
  }
}

function scene({ lanes, spans, keys, tips }) {
  return {
    lanes: lanes.map(([name, note, strong]) => ({ name: note && !strong ? `${name}: ${note}` : name, strong })),
    height: LANE,
    left: LEFT,
    label: "milliseconds",
    top: Math.max(...spans.map(([, , end]) => end), 1e-3),
    marks: [{ boxes: spans.map(([lane, begin, end, key, tip]) => ({ lane, begin, end, role: keys[key][0], key: `${lane} ${key} ${tip}`, lines: () => tooltip(tips[tip]) })) }],
  };
}

// The first line is a title; the others are texts alone.
function tooltip([title, ...lines]) {
  return [title, ...lines.map((line) => ["", line])];
}
