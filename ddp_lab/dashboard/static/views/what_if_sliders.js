// The sliders of the what-if view: each starts at the recorded value, and shows that.

import { button, checkbox, element, setText } from "../charts/dom.js";
import { significant } from "../charts/theme.js";

const NAMES = { world: "world size", bandwidth: "bandwidth", latency: "latency", cap: "bucket size limit" };
const HELP = {
  world: "Number of ranks. All are assumed to behave like the recorded ranks.",
  bandwidth: "Bandwidth of a rank's link in the fitted communication model.",
  latency: "Latency of one message between two ranks.",
  cap: "Size at which a bucket is closed (bucket_cap_mb).",
};

const AS_RECORDED = { world: null, bandwidth: null, latency: null, cap: null, without: false };

const nearest = (values, wanted) =>
  values.reduce(
    (best, value, index) =>
      Math.abs(Math.log(value / wanted)) < Math.abs(Math.log(values[best] / wanted)) ? index : best,
    0,
  );
const unit = {
  world: (value) => `${value.toLocaleString("en")} ranks`,
  bandwidth: (value) => `${significant(value)} Gbit/s`,
  latency: (value) => `${significant(value)} µs`,
  cap: (value) => `${significant(value)} MiB`,
};

export class WhatIfSliders {
  // changed(): a slider was moved
  constructor(changed) {
    this.changed = changed;
    this.chosen = { ...AS_RECORDED };
    this.rows = Object.fromEntries(Object.keys(NAMES).map((name) => [name, this.row(name)]));
    this.withoutText = element("span", {}, "without the straggler");
    const without = checkbox(this.withoutText, null, () => this.choose({ without: this.without.checked }));
    this.without = without.box;
    this.reset = button("As recorded", null, () => this.choose(AS_RECORDED));
    this.node = element(
      "div",
      { class: "ddp-what-if-sliders" },
      ...Object.values(this.rows).map((one) => one.node),
      element("div", { class: "ddp-what-if-row" }, without.node, this.reset),
    );
  }

  row(name) {
    const range = element("input", {
      type: "range",
      class: "ddp-range",
      min: "0",
      max: "1",
      step: "1",
      "aria-label": NAMES[name],
      title: HELP[name],
      input: () => this.choose({ [name]: Number(range.value) }),
    });
    const value = element("output", { class: "ddp-what-if-value" });
    const label = element("span", { class: "ddp-what-if-name", title: HELP[name] }, NAMES[name]);
    return { range, value, node: element("label", { class: "ddp-what-if-row" }, label, range, value) };
  }

  choose(values) {
    Object.assign(this.chosen, values);
    this.show();
    this.changed();
  }

  // Whether only the bucket size limit differs from the recording.
  get onlyCap() {
    return Object.entries(this.chosen).every(([name, value]) => (name === "cap") === (value !== AS_RECORDED[name]));
  }

  get moved() {
    return Object.entries(this.chosen).some(([name, value]) => value !== AS_RECORDED[name]);
  }

  // limits: see what_if.py; measurable: whether there are ranks that can measure their link
  draw(limits, measurable) {
    this.measurable = measurable;
    this.limits = limits;
    // The range of another model may be shorter.
    if (this.chosen.cap !== null) this.chosen.cap = Math.min(this.chosen.cap, limits.caps.length - 1);
    this.chosen.without &&= limits.ranks > 1;
    this.show();
  }

  // Why no bandwidth is known: all-reduces of large and small buckets take equally long, or all have similar sizes.
  get unknown() {
    if (this.limits.measured) return "no bandwidth limit found: large messages take as long as small ones";
    const how = this.measurable ? " Measure it with lab.measure_communication()." : "";
    return `not measured: the bucket sizes are too similar.${how}`;
  }

  show() {
    const { limits } = this;
    if (!limits) return;
    const caps = limits.recordedCaps;
    const ranges = {
      world: [limits.worlds, limits.recordedWorld, unit.world(limits.recordedWorld)],
      bandwidth: [
        limits.gbit,
        limits.recordedGbit,
        limits.recordedGbit === null ? "–" : unit.bandwidth(limits.recordedGbit),
      ],
      latency: [
        limits.latencyUs,
        limits.recordedLatencyUs || limits.latencyUs[0],
        limits.recordedLatencyUs ? unit.latency(limits.recordedLatencyUs) : "none found",
      ],
      cap: [limits.caps, caps.at(-1) ?? limits.caps.at(-1), caps.length ? capText(caps) : "–"],
    };
    for (const [name, [values, recorded, text]] of Object.entries(ranges)) this.showRow(name, values, recorded, text);
    this.without.checked = this.chosen.without;
    this.without.disabled = limits.ranks < 2;
    setText(
      this.withoutText,
      `without the straggler (rank ${limits.straggler}, ${significant(limits.behindMs)} ms behind the median)`,
    );
    this.reset.disabled = !this.moved;
  }

  // values: of the slider, undefined if they are not known; recorded: where it starts, and text: what is said there
  showRow(name, values, recorded, text) {
    const { range, value } = this.rows[name];
    range.disabled = range.hidden = !values;
    if (!values) return setText(value, this.unknown);
    range.max = String(values.length - 1);
    const chosen = this.chosen[name];
    const at = String(chosen ?? nearest(values, recorded));
    if (range.value !== at) range.value = at;
    const start = text === "–" ? "as recorded" : `${text}, as recorded`;
    const said = chosen === null ? start : unit[name](values[chosen]);
    setText(value, said);
    range.setAttribute("aria-valuetext", said);
  }
}

function capText(caps) {
  return caps.length > 1 && caps[0] !== caps.at(-1)
    ? `first ${significant(caps[0])}, then ${significant(caps.at(-1))} MiB`
    : unit.cap(caps.at(-1));
}
