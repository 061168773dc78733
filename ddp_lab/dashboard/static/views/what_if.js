// What if: sliders, the recorded and the predicted step by phase and bucket, and a button that tries the prediction.

import { asking } from "../app/life.js";
import { makeLegend } from "../app/toolbar.js";
import { Blocks } from "../charts/blocks.js";
import { sizeCanvas } from "../charts/canvas.js";
import { button, element, fill, makeTable, scrolled, section, setText } from "../charts/dom.js";
import { count, makeFills, milliseconds, readTheme } from "../charts/theme.js";
import { paint } from "../charts/timeline_paint.js";
import { AXIS_HEIGHT, GROUP_GAP, HEADER_HEIGHT, layOut } from "../steps/lanes.js";
import { joinNarrow } from "../steps/many_steps.js";
import { MarkStore, wholeBegin } from "../steps/marks.js";
import { decodeSteps } from "../steps/store.js";
import { WhatIfSliders } from "./what_if_sliders.js";

const ROW_SIZES = [3, 12]; // of a bucket
const HEIGHTS = [90, 320]; // of a picture; larger ones are scrolled
const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(value).toFixed(1)} %`;

export class WhatIfView {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.number = 0;
    this.predicted = null; // the predicted step
    this.picture = this.table = []; // blocks
    this.sliders = new WhatIfSliders(() => this.ask());
    this.empty = element("p", { class: "ddp-empty" });
    this.summary = element("div", { class: "ddp-summary", role: "status" });
    this.chart = new Blocks(actions);
    this.pictures = { recorded: new StepPicture("recorded buckets"), predicted: new StepPicture("predicted buckets") };
    this.run = button("Run it", null, () => this.actions.send({ type: "what if run", cap: this.sliders.chosen.cap }));
    this.why = element("span", { class: "ddp-muted", role: "status" });
    this.scores = makeTable("Predictions that were run (ms per step)", [
      "bucket size limit",
      "predicted",
      "measured",
      "error",
      ["saving predicted", "compared with the current setting"],
      ["saving measured", "compared with the current setting, in alternating blocks"],
    ]);
    this.scored = scrolled("predictions that were run", this.scores.node, "ddp-what-if-scores");
    this.twin = new Blocks(actions);
    this.content = element(
      "div",
      {},
      asking("kernel", this.sliders.node),
      this.summary,
      this.chart.node,
      makeLegend(),
      element("div", { class: "ddp-what-if-steps" }, ...Object.values(this.pictures).map((one) => one.node)),
      element("div", { class: "ddp-what-if-run" }, asking("ranks", this.run), this.why),
      this.scored,
      this.twin.node,
    );
    this.node = section("what-if", "what if", "What if", this.empty, this.content);
  }

  ask() {
    this.number += 1;
    this.askedAt = performance.now();
    this.actions.send({ type: "what if", number: this.number, ...this.sliders.chosen });
    this.drawRun();
  }

  // record: the recorded step that the dashboard shows, null before the first; records: all of the model; prediction,
  // trial: traits of the kernel; means: what the ranks can do; gone: what has happened to the kernel, if it is lost
  draw({ record, records, prediction: answer, trial, means, gone }) {
    this.trial = trial;
    const ready = answer?.state === "ready";
    this.empty.hidden = ready;
    this.content.hidden = !ready;
    if (!ready) return setText(this.empty, gone ? `${gone}. There is no prediction to show.` : (answer?.text ?? ""));
    this.answer = answer;
    this.sliders.draw(answer.limits, means?.link);
    this.take(answer);
    this.drawText(answer);
    this.chart.draw(this.picture);
    this.twin.draw(this.table);
    const whole = (one) => one?.complete && !one.abandoned;
    this.drawSteps(
      whole(record)
        ? record
        : ((records ?? []).findLast((one) => whole(one) && one.step <= (record?.step ?? Infinity)) ?? null),
      record,
    );
    this.drawRun();
  }

  // Decodes a new prediction.
  take(answer) {
    if (answer.body === this.body) return;
    this.body = answer.body;
    [this.picture, this.table] = [answer.blocks.slice(0, 1), answer.blocks.slice(1)];
    [this.predicted] = decodeSteps(answer.header, answer.body);
    if (this.askedAt && answer.number === this.number) {
      this.node.dataset.answered = String(answer.number);
      this.node.dataset.milliseconds = String(Math.round(performance.now() - this.askedAt));
      this.askedAt = null;
    }
  }

  drawText(answer) {
    const { recorded, same, predicted } = answer;
    const change = 100 * (predicted.step / same.step - 1);
    const off = 100 * (same.step / recorded.step - 1);
    const basis = Math.abs(off) < 0.5 ? "" : " compared with the simulation of the recorded setting";
    const what = this.sliders.moved
      ? `Predicted: ${milliseconds(predicted.step)} ms per step, ${signed(change)}${basis}.`
      : "Move a slider to get a prediction.";
    const agrees = Math.abs(off) < 0.5 ? "" : `; simulated: ${milliseconds(same.step)} ms (${signed(off)})`;
    setText(this.summary, `Recorded: ${milliseconds(recorded.step)} ms per step${agrees}. ${what} ${answer.about}`);
  }

  // Both steps on the same time axis, from the start of the backward.
  drawSteps(record, chosen) {
    const shown = { recorded: record, predicted: this.predicted };
    const known = Object.values(shown).filter(Boolean);
    const last = Math.max(...known.map((one) => Math.max(0, ...one.bounds.filter((value) => !Number.isNaN(value)))));
    const window = [Math.min(0, ...known.map(wholeBegin).filter((value) => !Number.isNaN(value))), last * 1.02 || 1];
    const titles = {
      recorded: record
        ? `recorded, step ${record.step}${record === chosen ? "" : ` (the last complete one)`}`
        : "recorded",
      predicted: "predicted",
    };
    for (const [name, picture] of Object.entries(this.pictures)) picture.draw(shown[name], window, titles[name]);
  }

  forgetTheme() {
    this.chart.forgetTheme();
  }

  drawRun() {
    const { answer, trial, sliders } = this;
    if (!answer || !trial) return;
    const running = trial.state === "running";
    this.run.disabled = running || Boolean(trial.why) || !sliders.onlyCap;
    const hint = sliders.onlyCap
      ? "Runs the new size limit and the current one alternately, then restores the current one."
      : "To run it on these ranks, change only the bucket size limit.";
    setText(this.why, running || trial.state === "failed" ? trial.text : trial.why || hint);
    this.why.classList.toggle("ddp-warning", trial.state === "failed");
    this.scored.hidden = !trial.scores.length;
    const rows = trial.scores
      .toReversed()
      .map((one) => [
        one.setting,
        milliseconds(one.predicted),
        milliseconds(one.measured),
        signed(one.error),
        signed(one.gainPredicted),
        signed(one.gainMeasured),
      ]);
    fill(this.scores.body, rows);
    if (rows.length !== this.told && rows.length) {
      this.told = rows.length;
      this.actions.say(
        `${rows[0][0]}: predicted ${rows[0][1]} milliseconds, measured ${rows[0][2]}, error ${rows[0][3]}`,
      );
    }
  }
}

// One step's buckets, drawn as in the timeline.
class StepPicture {
  constructor(label) {
    this.canvas = element("canvas", { role: "img", "aria-label": label });
    this.title = element("h4", {}, label);
    this.scroller = element(
      "div",
      { class: "ddp-what-if-scroll", tabindex: "0", role: "region", "aria-label": label },
      this.canvas,
    );
    this.node = element("div", { class: "ddp-what-if-step" }, this.title, this.scroller);
    this.marks = new MarkStore();
    this.ratio = 0; // of pixels, for which the fills are made
    this.fills = null;
  }

  draw(record, window_, title) {
    setText(this.title, title);
    const width = Math.floor(this.scroller.clientWidth);
    if (width < 40 || !record) return;
    const [needed, wanted] = ROW_SIZES.map(
      (row) => record.rankCount * (HEADER_HEIGHT + GROUP_GAP + record.buckets * row) + AXIS_HEIGHT,
    );
    const height = Math.max(Math.min(wanted, HEIGHTS[1]), HEIGHTS[0], needed);
    const pen = sizeCanvas(this.canvas, width, height);
    const ratio = window.devicePixelRatio || 1;
    if (this.ratio !== ratio) this.fills = makeFills(pen, ratio);
    this.ratio = ratio;
    const layout = layOut(record, { width, height, axis: "common", window: window_ });
    const view = {
      width,
      height,
      scroll: 0,
      theme: readTheme(this.node),
      fills: this.fills,
      selected: null,
      cursor: null,
      axis: "common",
      brush: null,
      marks: this.marks,
      over: false,
      first: null,
    };
    paint(pen, [{ record, shift: 0, layout, bars: joinNarrow(layout.bars) }], view);
    const exposed = Math.max(...Array.from(record.ranks, (_, row) => record.busy[row * 2 + 1] || 0));
    this.canvas.setAttribute(
      "aria-label",
      `${title}: ${count(record.rankCount, "rank")}, ${count(record.buckets, "bucket")}, up to ` +
        `${milliseconds(exposed)} ms of exposed communication`,
    );
  }
}
