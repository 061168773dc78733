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
    this.node = element(
      "div",
      {
        class: "ddp-tabs",
        role: "tablist",
        "aria-label": label,
        hidden: titles.size < 2,
        keydown: (event) => this.key(event),
      },
      ...this.buttons.values(),
    );
  }

  // hidden: a Set of titles without a tab for now
  draw(chosen, notes = {}, hidden = new Set()) {
    for (const [name, tab] of this.buttons) {
      tab.hidden = hidden.has(name);
      tab.setAttribute("aria-selected", String(name === chosen));
      tab.tabIndex = name === chosen ? 0 : -1;
      setText(tab, notes[name] ? `${name} (${notes[name]})` : name);
    }
  }

  key(event) {
    const names = [...this.buttons.keys()].filter((name) => !this.buttons.get(name).hidden);
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

const FEW = 5; // tabs that need no groups

// Tabs in groups, each a question of a reader: a row of questions, and below it the tabs of the chosen one.
export class TabGroups {
  // questions: [[question, [title, ...]], ...]; titles: of Tabs
  constructor(questions, titles, choose) {
    this.groups = titles.size > FEW ? questions : [];
    if (!this.groups.length) {
      const tabs = new Tabs(titles, choose);
      this.rows = [["", tabs]];
      this.node = tabs.node;
      return;
    }
    this.last = new Map(this.groups.map(([question, [first]]) => [question, first])); // the tab that was open
    const about = (members) => members.map((title) => titles.get(title)).join("\n");
    this.top = new Tabs(
      new Map(this.groups.map(([question, members]) => [question, about(members)])),
      (question) => choose(this.last.get(question)),
      "questions",
    );
    this.rows = this.groups.map(([question, members]) => [
      question,
      new Tabs(new Map(members.map((title) => [title, titles.get(title)])), choose, question),
    ]);
    for (const [, row] of this.rows) row.node.classList.add("ddp-subtabs");
    this.node = element("div", { class: "ddp-groups" }, this.top.node, ...this.rows.map(([, row]) => row.node));
  }

  draw(chosen, notes, hidden) {
    for (const [question, row] of this.rows) {
      row.draw(chosen, notes, hidden);
      if (this.top) row.node.hidden = !row.buttons.has(chosen) || row.buttons.has(question);
      if (this.top && row.buttons.has(chosen)) {
        this.last.set(question, chosen);
        const counts = this.groups.map(([one, members]) => [one, members.map((title) => notes[title]).find(Boolean)]);
        this.top.draw(question, Object.fromEntries(counts));
      }
    }
  }
}
