// Changes buckets and comm hook while training runs, and compares the steps before and after the change.

import { Asker, NeedsCluster, StatusLine } from "../app/control_status.js";
import { ChartCanvas, median } from "../charts/canvas.js";
import { button, choice, element, field, form, number, read, setText, Twin } from "../charts/dom.js";
import { drawScene } from "../charts/scene.js";
import { count, milliseconds } from "../charts/theme.js";

const ORDERS = [
  ["", "unchanged"],
  ["ready", "order of readiness"],
  ["reversed", "reverse registration"],
  ["registration", "registration"],
];
const HOOKS = ["none", "fp16", "bf16", "powersgd"];
const TITLE = "Change buckets or comm hook while training runs";
const TITLE_OF_THE_PAST = "Changes of buckets or comm hook during training";
const WAYS = [
  ["", "unchanged"],
  ["cap", "one limit for all"],
  ["first", "first bucket and limit"],
  ["list", "list of limits"],
];

export class ReconfigureForm {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.asker = new Asker("reconfigure", actions);
    this.status = new StatusLine();
    this.way = choice("bucket size limits", WAYS, () => this.showInputs());
    this.first = number("size limit of the first bucket in MiB", "1");
    this.cap = number("size limit of a bucket in MiB", "25");
    this.list = element("input", {
      type: "text",
      class: "ddp-text",
      "aria-label": "size limits in MiB in launch order",
      placeholder: "1, 5, 25",
      size: "14",
    });
    this.order = choice("order of the parameters", ORDERS);
    const id = `ddp-hooks-${Math.random().toString(36).slice(2)}`;
    this.hook = element("input", {
      type: "text",
      class: "ddp-text",
      "aria-label": "comm hook",
      placeholder: "unchanged",
      list: id,
      size: "11",
      title: "none, fp16, bf16, powersgd, or a name defined with DistributedDataParallel.register_named_comm_hook",
    });
    const names = element("datalist", { id }, ...HOOKS.map((value) => element("option", { value })));
    this.apply = button("Apply", "apply the change between two steps (Enter)", () => this.ask(), {
      class: "ddp-button ddp-primary",
    });
    this.back = button(
      "Change back",
      "restore limits, order and hook from before the last change; a second measurement makes the result more reliable",
      () => this.asker.ask({ back: true, reducer: this.reducer }),
    );
    this.inputs = {
      cap: field("size limit", this.cap, "MiB"),
      first: field("first", this.first, "MiB"),
      list: field("size limits", this.list, "MiB"),
    };
    const row = form(
      () => this.ask(),
      field("bucket size", this.way),
      this.inputs.first,
      this.inputs.cap,
      this.inputs.list,
      field("order", this.order),
      field("comm hook", this.hook, names),
      this.apply,
      this.back,
    );
    this.needs = new NeedsCluster(row, this.status.node);
    this.chart = new BeforeAfterChart(actions);
    this.node = element(
      "details",
      { class: "ddp-reconfigure", "aria-label": "change buckets while training runs", open: true },
      element("summary", { tabindex: "0" }, TITLE),
      this.needs.node,
      this.chart.node,
    );
    this.showInputs();
  }

  showInputs() {
    const way = this.way.value;
    this.inputs.cap.hidden = way !== "cap" && way !== "first";
    this.inputs.first.hidden = way !== "first";
    this.inputs.list.hidden = way !== "list";
  }

  ask() {
    const way = this.way.value;
    const change = { order: this.order.value || null, comm_hook: this.hook.value.trim() || null };
    if (way === "cap" || way === "first") change.bucket_cap_mb = read(this.cap);
    if (way === "first") change.first_bucket_mb = read(this.first);
    if (way === "list")
      change.bucket_cap_mb_list = this.list.value
        .split(/[,;\s]+/)
        .filter(Boolean)
        .map(Number);
    this.asker.ask({ change, reducer: this.reducer });
  }

  // shown: {state, text, compared} from the kernel; possible: whether there are ranks
  draw(reducer, assignment, control, shown, possible) {
    this.needs.node.hidden = !possible;
    setText(this.node.firstChild, possible ? TITLE : TITLE_OF_THE_PAST);
    this.reducer = reducer;
    const live = this.needs.draw(control);
    const compared = shown?.compared?.reducer === reducer ? shown.compared : undefined;
    const under = shown?.state === "asked";
    const state = this.asker.state(control);
    this.apply.disabled = under || state === "asked";
    this.back.hidden = !compared?.sides?.length;
    this.back.disabled = this.apply.disabled;
    this.status.draw(state, shown?.state === "failed" ? "" : shown?.text, shown?.state === "failed" ? shown.text : "");
    this.node.hidden = !live && !control?.stopped && !compared?.sides?.length;
    if (assignment && this.seen !== assignment.generation) {
      this.seen = assignment.generation;
      const caps = assignment.options?.bucket_cap_mb_list;
      setPlaceholder(this.hook, assignment.options?.comm_hook ?? "none");
      if (caps?.length)
        setPlaceholder(this.list, [...new Set(caps)].map((cap) => Number(cap.toPrecision(4))).join(", "));
    }
    this.chart.draw(compared);
  }
}

function setPlaceholder(input, text) {
  if (input.placeholder !== text) input.placeholder = text;
}

const SIDES = ["before", "after"];

class BeforeAfterChart {
  // actions: {redraw(), say(text)}
  constructor(actions) {
    this.verdict = element("p", { class: "ddp-sentence ddp-verdict-line", role: "status" });
    this.chart = new ChartCanvas("Times of steps before and after the change", actions);
    this.twin = new Twin("Before and after the change", [
      "",
      "buckets",
      "size limits",
      "comm hook",
      "from step",
      "steps",
      "median ms",
    ]);
    this.node = element("div", { class: "ddp-before-after" });
  }

  // found: from the kernel: {text, sides: [{step, ms, buckets, caps, hook}], verdict, percent, low, high, medians}
  draw(found) {
    if (!found?.sides?.length) return this.node.replaceChildren();
    if (!this.node.firstChild) this.node.append(this.verdict, this.chart.node, this.twin.node);
    setText(this.verdict, sentence(found));
    this.verdict.dataset.verdict = found.verdict ?? "";
    this.twin.draw(() =>
      found.sides.map((side, index) => [
        SIDES[index],
        String(side.buckets),
        side.caps,
        side.hook,
        String(side.step),
        String(side.ms.length),
        milliseconds(median(side.ms)),
      ]),
    );
    this.chart.label(`${sentence(found)} Dots are steps, bars their medians.`);
    drawScene(this.chart, () => scene(found));
  }
}

function sentence(found) {
  if (!found.verdict) return found.text || "Train some more steps for the comparison.";
  const sign = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)} %`;
  const [before, after] = found.medians.map(milliseconds);
  const counts = found.sides.map((side) => side.ms.length).join(" and ");
  return (
    `A step takes ${before} ms before, ${after} ms after: ${sign(found.percent)} (99 %: ${sign(found.low)} to ` +
    `${sign(found.high)}), ${found.verdict}. Medians of ${counts} steps.`
  );
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] ?? 0;
}

function scene({ sides }) {
  return {
    lanes: sides.map((side, index) => ({
      key: SIDES[index],
      name: SIDES[index],
      note: count(side.buckets, "bucket"),
      strong: true,
      lines: () => lines(SIDES[index], side),
    })),
    height: 54,
    left: 74,
    label: "ms from step to step; upper dots are later steps",
    top:
      quantile(
        sides.flatMap((side) => side.ms),
        0.97,
      ) * 1.08 || 1,
    // The two sides differ in shape as well as in colour.
    marks: sides.flatMap((side, lane) => [
      { dots: side.ms, lane, role: `rank${lane}`, shape: lane, size: 2.4, rows: true },
      { tick: median(side.ms), lane },
    ]),
  };
}

function lines(name, side) {
  return [
    `${name} the change`,
    ["buckets", String(side.buckets)],
    ["size limits", side.caps],
    ["comm hook", side.hook],
    ["from step", String(side.step)],
    ["steps", String(side.ms.length)],
    ["median", `${milliseconds(median(side.ms))} ms`],
  ];
}
