// What recording and this dashboard cost, measured while they run.

import { element, setText } from "../charts/dom.js";
import { significant } from "../charts/theme.js";

const WINDOW_MS = 10000;

export class OverheadLine {
  constructor() {
    this.node = element("p", { class: "ddp-overhead ddp-muted", title: "Recording: events that a rank records in a step, times the measured cost of one, over the step. Kernel: processor time of this dashboard's thread. Page: time that this page spends drawing it." });
    this.samples = [];
  }

  // found: of the kernel: {events, ns, step, kernel, kept}; busy: milliseconds that the page has spent drawing so far
  draw(found, busy) {
    const now = performance.now();
    this.samples.push([now, busy]);
    while (this.samples.length > 2 && now - this.samples[0][0] > WINDOW_MS) this.samples.shift();
    const [from, before] = this.samples[0];
    const page = now - from > 1000 ? (busy - before) / (now - from) : NaN;
    const shares = [share("kernel", found?.kernel), share("page", page)].filter(Boolean);
    setText(this.node, `Overhead: ${recording(found)}${shares.length ? `; this view takes ${shares.join(" and ")}` : ""}.${found?.kept ? ` ${found.kept}` : ""}`);
  }
}

function recording(found) {
  if (!found?.events) return "recording: its events are counted as steps come";
  const events = `recording ${Math.round(found.events).toLocaleString("en")} events a step and rank`;
  if (!found.ns) return `${events} (the cost of one was not measured here)`;
  const cost = `${events} × ${found.ns.toFixed(0)} ns`;
  return found.step > 0 ? `${cost} = ${Number(((found.events * found.ns) / (found.step * 1e4)).toPrecision(2))} % of the step (${significant(found.step)} ms)` : cost;
}

function share(name, value) {
  return value === undefined || value === null || Number.isNaN(value) ? null : `${(100 * value).toFixed(1)} % of a core in the ${name}`;
}
