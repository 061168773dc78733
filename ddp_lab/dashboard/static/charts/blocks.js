// The parts of a view that the kernel has made of its facts: sentences, notices, pictures, tables, what to change.

import { ChartCanvas } from "./canvas.js";
import { button, checkbox, element, fill, legend, makeTable, scrolled, setText, Twin } from "./dom.js";
import { drawScene } from "./scene.js";

export class Blocks {
  // actions: {choose(step), select(bucket), show(place), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.parts = [];
    this.node = element("div");
  }

  // blocks: of scene_json.py; shown: the step that the page shows
  draw(blocks, shown) {
    if (blocks !== this.blocks) this.write(blocks);
    for (const one of this.parts) one.draw?.(shown);
  }

  write(blocks) {
    this.blocks = blocks;
    const kinds = blocks.map(kindOf).join("\n");
    if (kinds !== this.kinds) {
      this.kinds = kinds;
      this.parts = blocks.map((one) => new BLOCK[Object.keys(one)[0]](this.actions, one));
      this.node.replaceChildren(...this.parts.map((one) => one.node));
    }
    this.parts.forEach((one, index) => one.write(blocks[index]));
  }

  forgetTheme() {
    for (const { chart } of this.parts) if (chart) chart.theme = null;
  }
}

// Blocks of the same kinds are refreshed in place.
function kindOf(block) {
  const [kind] = Object.keys(block);
  const { table, scene } = block;
  return table ? `table ${table.caption} ${table.head.join()}` : scene ? `scene ${scene.panels[0].more}` : kind;
}

class Sentence {
  constructor() {
    this.node = element("p", { class: "ddp-sentence ddp-summary", role: "status" });
  }

  write({ text }) {
    setText(this.node, text);
  }
}

class Notice {
  constructor() {
    this.node = element("div", { class: "ddp-notice", role: "alert" });
  }

  write({ notice }) {
    setText(this.node, notice);
  }
}

class Picture {
  constructor(actions, { scene }) {
    const [{ heading, more }] = scene.panels;
    const all = checkbox(more, null, () => actions.redraw());
    this.actions = actions;
    this.all = all.box;
    this.more = all.node;
    this.keys = element("div");
    this.chart = new ChartCanvas(scene.title, actions);
    const head = more ? [element("div", { class: "ddp-picture-head" }, element("h4", {}, heading), all.node)] : [];
    this.node = element("div", {}, ...head, this.keys, this.chart.node);
  }

  write({ scene }) {
    this.scene = scene;
    this.chart.label([scene.title, scene.summary].filter(Boolean).join(". "));
    this.more.hidden = scene.panels[0].y.lanes.length < 3; // the second one alone is as the first one
    const named = scene.panels
      .flatMap(({ marks }) => marks)
      .filter(({ name, role, kind }) => name && role && KEY[kind]);
    const keys = named.map(({ name, role, kind, about }) => [
      name,
      KEY[kind](`var(--ddp-role-${role})`),
      about || null,
    ]);
    const text = JSON.stringify(keys);
    if (text === this.text) return;
    this.text = text;
    this.keys.replaceChildren(...(keys.length > 1 ? [legend("legend", keys)] : []));
  }

  draw(shown) {
    drawScene(this.chart, this.scene, { actions: this.actions, shown, all: this.all.checked });
  }
}

// How marks of a kind look in a legend; dots have theirs in the picture.
const KEY = {
  bars: (colour) => `background: ${colour}`,
  spans: (colour) => `background: ${colour}`,
  line: (colour) => `height: 3px; background: ${colour}`,
  band: (colour) => `background: ${colour}; opacity: 0.5`,
};

class Numbers {
  constructor(_, { table: { caption, head, notes, folded } }) {
    const heads = head.map((name, index) => (notes[index] ? [name, notes[index]] : name));
    if (folded) this.twin = new Twin(caption, heads);
    this.table = this.twin?.table ?? makeTable(caption, heads);
    this.node = this.twin?.node ?? scrolled(caption, this.table.node, "ddp-numbers");
  }

  write({ table: { rows, words, warned } }) {
    const own = () => rows.map(([first, ...rest]) => [first.trim(), ...rest]);
    if (this.twin) return this.twin.draw(own);
    fill(this.table.body, own());
    rows.forEach(([first], index) => {
      const { classList } = this.table.body.rows[index];
      classList.toggle("ddp-line", first.startsWith(" "));
      classList.toggle("ddp-differs", warned.includes(index));
    });
    for (const row of this.table.node.rows)
      words.forEach((one, column) => row.cells[column].classList.toggle("ddp-words", one));
  }
}

// What to change, the largest saving first. brief: only titles, of so many
export class Advice {
  constructor(actions, { brief = Infinity } = {}) {
    this.actions = actions;
    this.brief = brief;
    this.node = element("ol", { class: "ddp-findings", "aria-label": "what to change, the largest saving first" });
  }

  write({ advice }) {
    const text = JSON.stringify(advice);
    if (text === this.text) return;
    this.text = text;
    const most = Math.max(...advice.map((one) => one.gain_percent), 1);
    this.node.replaceChildren(...advice.slice(0, this.brief).map((one) => this.item(one, most)));
  }

  item(one, most) {
    const brief = this.brief < Infinity;
    const width = `width: ${Math.max((one.gain_percent / most) * 100, 1)}%`;
    const bar = element("i", { class: "ddp-gain-bar", "aria-hidden": "true", style: width });
    const show = button("Show me", "Open the view where this can be seen", () => this.actions.show(one));
    const code = one.remedy.map((part, index) => (index % 2 ? element("code", {}, part) : part));
    const words = [element("p", {}, one.evidence), element("p", { class: "ddp-remedy" }, ...code)];
    return element(
      "li",
      {},
      element(
        "div",
        { class: "ddp-gain" },
        element("b", {}, one.saving),
        element("span", {}, "of the step"),
        ...(brief ? [] : [bar]),
      ),
      element(
        "div",
        {},
        element("strong", {}, one.title),
        ...(brief ? [] : words),
        ...(brief || one.view ? [element("p", {}, show)] : []),
      ),
    );
  }
}

const BLOCK = { text: Sentence, notice: Notice, scene: Picture, table: Numbers, advice: Advice };
