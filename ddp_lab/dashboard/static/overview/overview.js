// The overview: how the training does in a sentence, what a step consists of, what to change first, memory and loss.

import { Advice, Blocks } from "../charts/blocks.js";
import { button, element, section, setText } from "../charts/dom.js";
import { bytes } from "../charts/theme.js";
import { WAITING } from "../views/scene_view.js";

const MOST_FINDINGS = 3;

export class OverviewView {
  // actions: see Blocks
  constructor(actions) {
    this.lead = element("p", { class: "ddp-lead", role: "status" });
    this.step = new Blocks(actions);
    this.state = element("p", { class: "ddp-sentence ddp-muted" });
    this.list = new Advice(actions, { brief: MOST_FINDINGS });
    this.more = button("", "Every finding, with its evidence", () => actions.show({ view: "findings" }), {
      class: "ddp-link",
    });
    const title = element("h4", {}, "What to change first");
    const change = element("section", {}, title, this.state, this.list.node, this.more);
    this.facts = element("dl", { class: "ddp-overview-facts" });
    this.course = new Blocks(actions);
    this.also = element("section", {}, element("h4"), this.facts, this.course.node);
    const below = element("div", { class: "ddp-columns" }, change, this.also);
    this.node = section("overview", "overview", "Overview", this.lead, this.step.node, below);
  }

  // overview: of the kernel, see overview.py; findings: of the view of that name; ranks: rows of the table of ranks
  draw({ overview, findings, ranks, gone }) {
    setText(this.lead, overview?.text ?? (gone ? `${gone}. There is no analysis to show.` : WAITING));
    this.step.draw(overview?.blocks ?? []);
    this.course.draw(overview?.course ?? []);
    const [headline, ...blocks] = findings?.blocks ?? [{ text: WAITING }];
    setText(this.state, headline.text);
    const count = findings?.count ?? 0;
    this.list.write({ advice: blocks.find(({ advice }) => advice)?.advice ?? [] });
    this.more.hidden = !count;
    setText(this.more, count > MOST_FINDINGS ? `All ${count} findings` : "Evidence and remedies");
    this.drawFacts(memoryOf(ranks ?? []), overview?.logged ?? []);
  }

  drawFacts(memory, logged) {
    const rows = [...memory, ...logged];
    this.also.hidden = !rows.length;
    const title = logged.length
      ? memory.length
        ? "Memory, and what the program logs"
        : "What the program logs"
      : "Memory";
    setText(this.also.firstChild, title);
    const text = JSON.stringify(rows);
    if (text === this.known) return;
    this.known = text;
    this.facts.replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }

  forgetTheme() {
    this.step.forgetTheme();
    this.course.forgetTheme();
  }
}

// The memory of the ranks, as far as it is known, as a row.
function memoryOf(ranks) {
  const known = ranks.filter((one) => one.memory > 0).sort((a, b) => a.memory - b.memory);
  if (!known.length) return [];
  const [low, high] = [known[0], known.at(-1)].map((one) => bytes(one.memory));
  return [["memory of a rank", low === high ? high : `${low} to ${high} (most: rank ${known.at(-1).rank})`]];
}
