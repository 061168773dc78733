// A cell's output by rank: one rank at a time, or side by side. JupyterLab's own renderers draw the parts.

import { element, setText } from "../charts/dom.js";
import { Tabs } from "./tabs.js";

const SIGNS = { failed: " ✗", unblocked: " ■", interrupted: " ■" };

// As Python's `label_of`.
function labelOf(ranks) {
  const runs = [];
  for (const rank of ranks) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  return (
    `${ranks.length > 1 ? "ranks" : "rank"} ` +
    `${runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ")}`
  );
}

// One display of a rank.
class Part {
  constructor(rendermime) {
    this.rendermime = rendermime;
    this.node = element("div", { class: "ddp-part" });
  }

  async draw(block, follows) {
    if (block === this.block) return;
    this.block = block;
    const mime = this.rendermime.preferredMimeType(block.data, "any");
    const { node } = this;
    node.hidden = !mime || block.data[mime] === "";
    if (node.hidden) return;
    const fresh = mime !== this.mime;
    if (fresh) {
      this.end();
      this.mime = mime;
      this.renderer = this.rendermime.createRenderer(mime);
      this.renderer.node.dataset.mimeType = mime;
    }
    const { renderer } = this;
    const atEnd = follows && node.scrollTop + node.clientHeight >= node.scrollHeight - 8;
    await renderer.renderModel(
      this.rendermime.createModel({ data: block.data, metadata: block.metadata, trusted: true }),
    );
    if (renderer !== this.renderer || !node.isConnected) return;
    if (!renderer.isAttached) renderer.constructor.attach(renderer, node); // Lumino's `Widget.attach`
    if (atEnd) node.scrollTop = node.scrollHeight;
  }

  end() {
    if (this.renderer?.node.isConnected) this.renderer.dispose();
    this.renderer = null;
  }
}

// The output of one group of ranks, which is the same on all of them.
class RankPage {
  constructor(rendermime, label, attributes) {
    this.rendermime = rendermime;
    this.label = label;
    this.parts = [];
    this.name = element("div", { class: "ddp-rank-name" });
    this.node = element(
      "section",
      { class: "ddp-rank-page", "aria-label": `output of ${label}`, ...attributes },
      this.name,
    );
  }

  draw(blocks, state, follows) {
    setText(this.name, this.label + (SIGNS[state] ?? ""));
    this.name.dataset.state = state;
    for (const [place, block] of [...blocks].sort(([a], [b]) => a - b)) {
      if (!this.parts[place]) {
        this.parts[place] = new Part(this.rendermime);
        this.node.append(this.parts[place].node);
      }
      this.parts[place].draw(block, follows);
    }
  }

  end() {
    this.parts.forEach((part) => part.end());
    this.node.remove();
  }
}

export class Pages {
  // view: "tabs" or "side-by-side"; output: see `KernelCells`
  constructor(view, rendermime, output) {
    this.view = view;
    this.rendermime = rendermime;
    this.output = output;
    this.pages = new Map(); // label -> RankPage
    this.bar = element("div");
    this.body = element("div", {
      class: "ddp-pages",
      "data-view": view,
      ...(view === "tabs" ? {} : { tabindex: "0", role: "group", "aria-label": "the ranks' outputs" }),
    });
    this.node = element("div", {}, this.bar, this.body);
  }

  end() {
    this.pages.forEach((page) => page.end());
    this.node.remove();
  }

  draw() {
    const { groups, blocks, states, ended } = this.output;
    const labelled = new Map(groups.map((ranks) => [labelOf(ranks), ranks]));
    const chosen = groups.find((ranks) => ranks.includes(this.output.chosen)) ?? groups[0];
    if (this.view === "tabs") this.drawTabs(labelled, labelOf(chosen));
    const shown = this.view === "tabs" ? new Map([[labelOf(chosen), chosen]]) : labelled;
    for (const [label, page] of this.pages) {
      if (shown.has(label)) continue;
      page.end();
      this.pages.delete(label);
    }
    this.body.style.setProperty("--ddp-rows", 1 + Math.max(...groups.map(([rank]) => blocks.get(rank)?.size ?? 0)));
    let before = null;
    for (const [label, [rank]] of shown) {
      const page = this.pageOf(label);
      if (!page.node.isConnected) this.body.insertBefore(page.node, before ? before.nextSibling : this.body.firstChild);
      page.draw(blocks.get(rank) ?? new Map(), states[rank] ?? "", !ended);
      before = page.node;
    }
  }

  pageOf(label) {
    if (!this.pages.has(label)) {
      const role = this.view === "tabs" ? "tabpanel" : "group";
      this.pages.set(label, new RankPage(this.rendermime, label, { role }));
    }
    return this.pages.get(label);
  }

  drawTabs(labelled, chosen) {
    const { states } = this.output;
    const titles = new Map();
    for (const [label, [rank]] of labelled)
      titles.set(label, states[rank] ? `${label}: ${states[rank]}` : `output of ${label}`);
    const key = JSON.stringify([...titles]);
    if (key !== this.tabsKey) {
      this.tabsKey = key;
      this.tabs = new Tabs(titles, (label) => this.open(label), "ranks");
      this.tabs.node.hidden = false; // one tab shows whose output this is
      this.bar.replaceChildren(this.tabs.node);
    }
    this.tabs.draw(chosen, {});
    for (const [label, tab] of this.tabs.buttons) {
      const state = states[labelled.get(label)[0]] ?? "";
      tab.dataset.state = state;
      tab.append(SIGNS[state] ?? "");
    }
  }

  open(label) {
    [this.output.chosen] = this.output.groups.find((ranks) => labelOf(ranks) === label);
    this.draw();
    this.tabs.buttons.get(label).scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}
