// Tabs: one panel is on the page at a time; the arrow keys go from tab to tab.

import { button, element, setText } from "../charts/dom.js";

export class Tabs {
  // titles: of the tabs, in order, each with what it shows; choose(name): the reader opens one; label: of all tabs
  constructor(titles, choose, label = "views") {
    this.choose = choose;
    this.buttons = new Map(
      [...titles].map(([name, about]) => {
        const look = { role: "tab", class: "ddp-tab", "aria-selected": "false", tabindex: "-1" };
        return [name, button(name, about, () => choose(name), look)];
      }),
    );
    this.node = element("div", { class: "ddp-tabs", role: "tablist", "aria-label": label, hidden: titles.size < 2, keydown: (event) => this.key(event) }, ...this.buttons.values());
  }

  draw(chosen, notes) {
    for (const [name, tab] of this.buttons) {
      tab.setAttribute("aria-selected", String(name === chosen));
      tab.tabIndex = name === chosen ? 0 : -1;
      setText(tab, notes[name] ? `${name} (${notes[name]})` : name);
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
