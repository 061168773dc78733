// The overview: how the training does in a sentence, what a step consists of, what to change first, memory and loss.

import { ChartCanvas } from "../charts/canvas.js";
import { button, checkbox, element, phaseLegend, section, setText, Twin } from "../charts/dom.js";
import { drawScene } from "../charts/scene.js";
import { bytes, milliseconds, significant } from "../charts/theme.js";
import { PHASES } from "../generated.js";
import { findingHeadline, placeOf, savingOf } from "../views/findings.js";

const MOST_FINDINGS = 3;
const sum = (parts) => parts.reduce((total, ms) => total + ms, 0);

export class OverviewView {
  // actions: {show(place), open(view), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.lead = element("p", { class: "ddp-lead", role: "status" });
    this.chart = new ChartCanvas("What a typical step consists of (ms)", actions);
    const byRank = checkbox("by rank", "a bar for each rank", () => actions.redraw());
    this.byRank = byRank.box;
    this.twin = new Twin("What a typical step consists of (ms)", ["", "ms", ...PHASES.map((one) => one.name)]);
    const head = element("div", { class: "ddp-overview-head" }, element("h4", {}, "A step"), byRank.node);
    this.step = element(
      "section",
      { "aria-label": "a step" },
      head,
      phaseLegend("from left to right"),
      this.chart.node,
      this.twin.node,
    );
    this.state = element("p", { class: "ddp-sentence ddp-muted" });
    this.list = element("ol", { class: "ddp-findings", "aria-label": "what to change first" });
    this.more = button("", "Every finding, with its evidence", () => actions.show({ view: "findings" }), {
      class: "ddp-link",
    });
    const change = element(
      "section",
      { "aria-label": "what to change first" },
      element("h4", {}, "What to change first"),
      this.state,
      this.list,
      this.more,
    );
    this.facts = element("dl", { class: "ddp-overview-facts" });
    this.line = new ChartCanvas("What the program logged", actions);
    const also = element(
      "section",
      { "aria-label": "memory and what was logged" },
      element("h4"),
      this.facts,
      this.line.node,
    );
    this.also = also;
    this.node = section(
      "overview",
      "overview",
      "Overview",
      this.lead,
      this.step,
      element("div", { class: "ddp-columns" }, change, also),
    );
  }

  // facts: those of the panels (see panels.js)
  draw({ overview, findings, means, ranks, records, gone }) {
    setText(
      this.lead,
      overview?.text ?? (gone ? `${gone}. There is no analysis to show.` : "Waiting for the analysis."),
    );
    this.step.hidden = !overview?.parts;
    if (overview?.parts) this.drawStep(overview);
    this.drawFindings(findings, means, records);
    this.drawFacts(ranks ?? [], overview?.logged ?? []);
  }

  drawStep({ parts, ranks, total }) {
    const rows = [
      ["a step", parts],
      ...(this.byRank.checked ? ranks.map(([rank, ofRank]) => [`rank ${rank}`, ofRank]) : []),
    ];
    this.byRank.parentNode.hidden = ranks.length < 2;
    const whole = (lane) => `${milliseconds(lane ? sum(rows[lane][1]) : total)} ms`;
    this.chart.label(
      `A step: ${PHASES.map(({ name }, index) => `${name} ${milliseconds(parts[index])} ms`).join(", ")}`,
    );
    this.twin.draw(() =>
      rows.map(([name, ofRow], lane) => [name, whole(lane).slice(0, -3), ...ofRow.map(milliseconds)]),
    );
    drawScene(this.chart, () => ({
      lanes: rows.map(([name], lane) => ({ name, strong: lane === 0 })),
      height: 26,
      left: 62,
      right: 66,
      label: "ms",
      top: Math.max(...rows.map(([, ofRow]) => sum(ofRow))) || 1,
      marks: PHASES.map(({ key, name }, index) => ({
        bars: rows.map(([, ofRow]) => ofRow[index] ?? 0),
        role: key,
        lines: (lane) => [rows[lane][0], [name, `${milliseconds(rows[lane][1][index])} ms`], ["step", whole(lane)]],
        text: index === PHASES.length - 1 && whole,
      })),
    }));
  }

  drawFindings(found, means, records) {
    const items = found?.items ?? [];
    this.records = records;
    setText(this.state, findingHeadline(found, means));
    const text = JSON.stringify(items);
    if (text === this.shown) return;
    this.shown = text;
    this.list.replaceChildren(...items.slice(0, MOST_FINDINGS).map((one) => this.item(one)));
    this.more.hidden = !items.length;
    setText(this.more, items.length > MOST_FINDINGS ? `All ${items.length} findings` : "Evidence and remedies");
  }

  item(one) {
    const show = button("Show me", "Open the view where this can be seen", () =>
      this.actions.show(placeOf(one, this.records)),
    );
    const body = element("div", {}, element("strong", {}, one.title), element("p", {}, show));
    return element(
      "li",
      {},
      element("div", { class: "ddp-gain" }, element("b", {}, `${savingOf(one)} %`), element("span", {}, "of the step")),
      body,
    );
  }

  // ranks: rows of the table of ranks; logged: [{name, value, step, values}, ...], see overview.py
  drawFacts(ranks, logged) {
    const memory = ranks.filter((one) => one.memory > 0);
    const [low, high] = [Math.min(...memory.map((one) => one.memory)), Math.max(...memory.map((one) => one.memory))];
    const most = memory.find((one) => one.memory === high);
    const range =
      bytes(low) === bytes(high) ? bytes(high) : `${bytes(low)} to ${bytes(high)} (most: rank ${most?.rank})`;
    const rows = [
      ...(memory.length ? [["memory of a rank", range]] : []),
      ...logged.map(({ name, value }) => [name, value]),
    ];
    this.also.hidden = !rows.length;
    setText(
      this.also.firstChild,
      logged.length ? (memory.length ? "Memory, and what the program logs" : "What the program logs") : "Memory",
    );
    this.drawLine(logged.find(({ name }) => name === "loss") ?? logged[0]);
    const text = JSON.stringify(rows);
    if (text === this.known) return;
    this.known = text;
    this.facts.replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }

  // The course of the loss, or of what else was logged first.
  drawLine(logged) {
    const drawn = logged?.values.length > 1;
    this.line.node.hidden = !drawn;
    if (!drawn) return;
    const { name, step, values } = logged;
    this.line.label(`${name}: from ${significant(values[0])} to ${significant(values.at(-1))}`);
    drawScene(this.line, () => ({
      label: "step",
      steps: step.map((one, index) => ({
        key: `${one} ${index}`,
        name: one.toLocaleString("en"),
        lines: () => [`step ${one.toLocaleString("en")}`, [name, significant(values[index])]],
      })),
      panels: [
        {
          label: name,
          height: 90,
          top: Math.max(...values) || 1,
          marks: [{ line: values, role: "accent", width: 1.6 }],
        },
      ],
    }));
  }
}
