// A view without a script of its own: the sentences, pictures and tables that the kernel has made of its facts.

import { ChartCanvas } from "../charts/canvas.js";
import { element, fill, legend, makeTable, scrolled, section, setText, Twin } from "../charts/dom.js";
import { drawScene, sceneOf } from "../charts/scene.js";
import { COLOURS } from "../generated.js";

export class SceneView {
  // name: of the view; about: its entry in VIEWS; actions: {choose(step), select(bucket), redraw(), say(text)}
  constructor(actions, name, { title }) {
    this.actions = actions;
    this.waiting = element("p", { class: "ddp-sentence", role: "status" }, "Waiting for the analysis.");
    this.parts = [];
    this.place = element("div", {}, this.waiting);
    this.node = section(name, title.toLowerCase(), title, this.place);
  }

  // blocks: of scene_json.py, undefined before the kernel's first answer; shown: the step that the page shows; gone:
  // what has happened to the kernel, if it is lost
  draw(blocks, shown, gone) {
    if (!blocks) setText(this.waiting, gone ? `${gone}. There is no analysis to show.` : "Waiting for the analysis.");
    else if (blocks !== this.blocks) this.write(blocks);
    for (const one of this.parts) one.draw?.(shown);
  }

  write(blocks) {
    this.blocks = blocks;
    const kinds = blocks.map(kindOf).join("\n");
    if (kinds !== this.kinds) {
      this.kinds = kinds;
      this.parts = blocks.map((one) => new BLOCK[Object.keys(one)[0]](one, this.actions));
      this.place.replaceChildren(...this.parts.map((one) => one.node));
    }
    this.parts.forEach((one, index) => one.write(blocks[index]));
  }

  forgetTheme() {
    for (const { chart } of this.parts) if (chart) chart.theme = null;
  }
}

// Blocks of the same kinds are refreshed in place.
function kindOf({ scene, table }) {
  return scene ? "scene" : table ? `table ${table.caption} ${table.head.join()}` : "text";
}

class Sentence {
  constructor() {
    this.node = element("p", { class: "ddp-sentence ddp-summary", role: "status" });
  }

  write({ text }) {
    setText(this.node, text);
  }
}

class Picture {
  constructor({ scene }, actions) {
    this.actions = actions;
    this.keys = element("div");
    this.chart = new ChartCanvas(scene.title, actions);
    this.node = element("div", {}, this.keys, this.chart.node);
  }

  write({ scene }) {
    this.scene = scene;
    this.chart.label(scene.title);
    const named = scene.panels.flatMap(({ marks }) => marks).filter(({ name, role }) => name && role);
    const text = JSON.stringify(named.map(({ name, role }) => [name, role]));
    if (text === this.text) return;
    this.text = text;
    this.keys.replaceChildren(
      ...(named.length > 1
        ? [
            legend(
              "legend",
              named.map(({ name, role }) => [name, `background: ${COLOURS[role]}`]),
            ),
          ]
        : []),
    );
  }

  draw(shown) {
    drawScene(this.chart, () => sceneOf(this.scene, this.actions, shown));
  }
}

class Numbers {
  constructor({ table: { caption, head, notes, folded } }) {
    const heads = head.map((name, index) => (notes[index] ? [name, notes[index]] : name));
    if (folded) this.twin = new Twin(caption, heads);
    this.table = this.twin?.table ?? makeTable(caption, heads);
    this.node = this.twin?.node ?? scrolled(caption, this.table.node, "ddp-numbers");
  }

  write({ table: { rows, words } }) {
    const own = () => rows.map(([first, ...rest]) => [first.trim(), ...rest]);
    if (this.twin) return this.twin.draw(own);
    fill(this.table.body, own());
    rows.forEach(([first], index) => this.table.body.rows[index].classList.toggle("ddp-line", first.startsWith(" ")));
    for (const row of this.table.node.rows)
      words.forEach((one, column) => row.cells[column].classList.toggle("ddp-words", one));
  }
}

const BLOCK = { text: Sentence, scene: Picture, table: Numbers };
