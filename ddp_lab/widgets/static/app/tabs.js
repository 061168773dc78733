// Tabs: one panel is on the page at a time; the arrow keys go from tab to tab.

import { element } from "../charts/theme.js";

export class Tabs {
  // names: of the tabs, in order; choose(name): the reader opens one
  constructor(names, choose) {
    this.choose = choose;
    this.buttons = new Map(
      names.map((name) => {
        const button = element("button", { type: "button", role: "tab", class: "ddp-tab", "aria-selected": "false", tabindex: "-1" }, name);
        button.addEventListener("click", () => choose(name));
        return [name, button];
      }),
    );
    this.node = element("div", { class: "ddp-tabs", role: "tablist", "aria-label": "views", hidden: names.length < 2 }, ...this.buttons.values());
    this.node.addEventListener("keydown", (event) => this.key(event));
  }

  draw(chosen, notes) {
    for (const [name, button] of this.buttons) {
      button.setAttribute("aria-selected", String(name === chosen));
      button.tabIndex = name === chosen ? 0 : -1;
      const text = notes[name] ? `${name} (${notes[name]})` : name;
      if (button.textContent !== text) button.textContent = text;
    }
  }

  key(event) {
    const names = [...this.buttons.keys()];
    const index = names.findIndex((name) => this.buttons.get(name) === event.target);
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: names.length - 1 }[event.key];
    if (index < 0 || to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const name = names[(to + names.length) % names.length];
    this.choose(name);
    this.buttons.get(name).focus();
  }
}
