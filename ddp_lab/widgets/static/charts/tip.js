// The box beside the pointer: a title, then pairs of a name and a value.

import { element } from "./theme.js";

export class Tip {
  constructor() {
    this.node = element("div", { class: "ddp-tip", role: "tooltip", hidden: true });
  }

  hide() {
    this.node.hidden = true;
  }

  // lines: [title, [name, value], ...]; x, y: in pixels of `box`, which contains the tip
  show(lines, x, y, box) {
    this.node.hidden = false;
    this.node.replaceChildren(
      element("strong", {}, lines[0]),
      ...lines.slice(1).map(([name, value]) => element("div", {}, element("span", {}, name), element("span", {}, value))),
    );
    const { offsetWidth, offsetHeight } = this.node;
    const left = x + 16 + offsetWidth > box.clientWidth ? x - offsetWidth - 12 : x + 16;
    this.node.style.left = `${Math.max(left, 0)}px`;
    this.node.style.top = `${Math.max(Math.min(y + 14, box.clientHeight - offsetHeight), 0)}px`;
  }
}

// The same lines for a screen reader.
export function spoken(lines) {
  return [lines[0], ...lines.slice(1).map((pair) => pair.join(" "))].join(", ");
}
