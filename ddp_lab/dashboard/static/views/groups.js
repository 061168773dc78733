// Lanes over the time, with a table: collectives by process group, and parameter groups in one step.

import { ChartCanvas } from "../charts/canvas.js";
import { element, fill, legend, makeTable, section, setText } from "../charts/dom.js";
import { COLOURS } from "../generated.js";
import { drawScene } from "../charts/scene.js";

const [LANE, LEFT] = [20, 210];

class LanesView {
  // actions: {redraw(), say(text)}; title: of the view; empty: what it says while the kernel has found nothing
  constructor(actions, name, about, title, caption, empty) {
    this.title = title;
    this.empty = empty;
    this.words = element("div", { class: "ddp-summary", role: "status" });
    this.keys = element("div");
    this.chart = new ChartCanvas(`${title} (ms)`, actions);
    this.caption = caption;
    this.tablePlace = element("div", { class: "ddp-table-scroll" });
    this.node = section(name, about, title, this.words, this.keys, this.chart.node, this.tablePlace);
  }

  // found: from the kernel, see groups_trait and parameter_groups_trait; {} before its first answer
  draw(found) {
    const lanes = found?.lanes ?? [];
    if (!lanes.length) {
      setText(this.words, found?.lanes ? (found.words?.[0] ?? this.empty) : "Waiting for the kernel.");
      for (const node of [this.keys, this.chart.node, this.tablePlace]) node.hidden = true;
      this.shown = null;
      return;
    }
    for (const node of [this.keys, this.chart.node, this.tablePlace]) node.hidden = false;
    if (found !== this.shown) this.write(found);
    this.shown = found;
    drawScene(this.chart, () => scene(found));
  }

  write(found) {
    this.words.replaceChildren(...found.words.map((text) => element("div", {}, text)));
    this.keys.replaceChildren(legend("legend", found.keys.map(([role, name]) => [name, `background: ${COLOURS[role]}`])));
    this.chart.label(`${this.title}. ${found.words.join(" ")}`);
    this.writeTable(found.head, found.table);
  }

  // head: names of the columns; those of texts end in a colon. Another head needs another table.
  writeTable(head, rows) {
    if (head.join() !== this.head) {
      this.head = head.join();
      this.table = makeTable(this.caption, head.map((name) => name.replace(/:$/, "")));
      this.tablePlace.replaceChildren(this.table.node);
    }
    fill(this.table.body, rows);
    for (const row of this.table.node.rows) head.forEach((name, column) => row.cells[column].classList.toggle("ddp-words", name.endsWith(":")));
  }
}

export class GroupsView extends LanesView {
  constructor(actions) {
    super(actions, "groups", "collectives by process group", "Collectives by group", "Process groups", "No collective has been recorded yet.");
  }
}

export class ParameterGroupsView extends LanesView {
  constructor(actions) {
    super(actions, "parameter_groups", "parameter groups of fully_shard and replicate", "Parameter groups", "Medians by group and rank", "");
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
