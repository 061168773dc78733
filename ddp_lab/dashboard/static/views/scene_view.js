// A view without a script of its own: the blocks that the kernel has made of its facts.

import { Blocks } from "../charts/blocks.js";
import { element, section, setText } from "../charts/dom.js";

export const WAITING = "Waiting for the analysis.";

export class SceneView {
  // name: of the view; about: its entry in VIEWS; actions: see Blocks
  constructor(actions, name, { title }) {
    this.waiting = element("p", { class: "ddp-sentence", role: "status" }, WAITING);
    this.blocks = new Blocks(actions);
    this.node = section(name, title.toLowerCase(), title, this.waiting);
  }

  // blocks: undefined before the kernel's first answer; shown: the step that the page shows; gone: what has happened to
  // the kernel, if it is lost
  draw(blocks, shown, gone) {
    const content = blocks ? this.blocks.node : this.waiting;
    if (this.node.lastChild !== content) this.node.lastChild.replaceWith(content);
    if (blocks) this.blocks.draw(blocks, shown);
    else setText(this.waiting, gone ? `${gone}. There is no analysis to show.` : WAITING);
  }

  forgetTheme() {
    this.blocks.forgetTheme();
  }
}
