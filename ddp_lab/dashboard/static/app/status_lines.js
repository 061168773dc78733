// The lines around the views: alarms and the replay controls above them, the overhead below.

import { button, choice, element, setOptions, setText } from "../charts/dom.js";
import { duration, significant } from "../charts/theme.js";
import { asking } from "./life.js";

export class Alarm {
  // actions: {send(command)}
  constructor(actions) {
    this.faults = new Line(
      "⚠",
      "Fault injection",
      "alert",
      button("End all", "End all faults before the next forward", () =>
        actions.send({ type: "fault", id: "", do: "end" }),
      ),
    );
    this.pauses = new Line(
      "",
      "Paused",
      "group",
      button("Continue", "Remove all breakpoints and continue training", () =>
        actions.send({ type: "step", id: "", do: "continue", reducer: null }),
      ),
    );
    this.node = element("div", { class: "ddp-alarms" }, this.faults.node, this.pauses.node);
  }

  // stepping, injection: of the kernel; live: whether the controls have a cluster
  draw(live, stepping, injection) {
    const faults = live ? (injection?.faults ?? []) : [];
    const several = faults.length > 1 ? `${faults.length} active faults` : "1 active fault";
    this.faults.draw(
      faults.length
        ? `${several} (${faults
            .slice(0, 3)
            .map((one) => `rank ${one.rank}: ${one.text}`)
            .join("; ")}${faults.length > 3 ? "; …" : ""}).`
        : "",
    );
    const pauses = live ? (stepping?.pauses ?? []) : [];
    const phrases = pauses.slice(0, 3).map(([words, since]) => `${words} (${duration(Date.now() / 1000 - since)})`);
    this.pauses.draw(
      pauses.length ? `${phrases.join("; ")}${pauses.length > 3 ? `; and ${pauses.length - 3} more` : ""}.` : "",
    );
  }
}

class Line {
  constructor(sign, title, role, action) {
    this.text = element("span");
    this.node = element(
      "div",
      { class: "ddp-alarm", role, "aria-label": title, hidden: true },
      element("span", { class: sign ? "ddp-sign" : "ddp-sign ddp-pause-sign", "aria-hidden": "true" }, sign),
      element("strong", {}, `${title}:`),
      this.text,
      asking("ranks", action),
    );
  }

  draw(text) {
    this.node.hidden = !text;
    setText(this.text, text);
  }
}

const SPEEDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5];

export class PlayerBar {
  // send(command): to the kernel
  constructor(send) {
    this.send = (asked) => send({ type: "player", ...asked });
    this.button = button("", null, () => this.send({ playing: !this.state.playing }), {
      class: "ddp-button ddp-primary ddp-play",
    });
    this.range = element("input", {
      type: "range",
      min: "0",
      max: "1000",
      value: "0",
      class: "ddp-range",
      "aria-label": "position in the recording",
    });
    this.range.addEventListener("input", () => {
      this.held = true; // the user moves it: ignore the kernel's position
      this.write(this.chosen);
    });
    // "change" is not enough: there is none if the user moves it away and back.
    for (const end of ["change", "pointerup", "pointercancel", "blur"])
      this.range.addEventListener(end, () => this.release());
    this.time = element("span", { class: "ddp-muted ddp-played" });
    this.speeds = SPEEDS; // plus any other speed that was set
    this.speed = choice("speed of the replay", [], () => this.send({ speed: Number(this.speed.value) }));
    const speed = element("label", { class: "ddp-field", title: "1: the recorded speed" }, "speed ", this.speed);
    const steps = element("span", { class: "ddp-field ddp-steps" }, this.button, this.range, this.time);
    this.node = element(
      "div",
      { class: "ddp-toolbar ddp-player", role: "toolbar", "aria-label": "replay", hidden: true },
      asking("kernel", steps, speed),
    );
  }

  release() {
    if (!this.held) return;
    this.held = false;
    this.send({ position: this.chosen });
  }

  get chosen() {
    return (Number(this.range.value) / 1000) * this.state.seconds;
  }

  write(position) {
    setText(this.time, `${position.toFixed(2)} of ${this.state.seconds.toFixed(2)} s`);
    this.range.setAttribute("aria-valuetext", this.time.textContent);
  }

  // state: {playing, position, seconds, speed}; empty where nothing is replayed
  draw(state) {
    this.node.hidden = !state?.seconds;
    if (this.node.hidden) return;
    this.state = state;
    const over = state.position >= state.seconds;
    setText(this.button, state.playing ? "❚❚ Pause" : over ? "↻ Again" : "▶ Play");
    if (!this.speeds.includes(state.speed)) this.speeds = [...this.speeds, state.speed].sort((a, b) => a - b);
    setOptions(
      this.speed,
      this.speeds.map((one) => [one, `${one} ×`]),
    );
    if (this.speed.value !== String(state.speed)) this.speed.value = String(state.speed);
    if (this.held) return;
    this.range.value = String(Math.round((1000 * state.position) / state.seconds));
    this.write(state.position);
  }
}

const WINDOW_MS = 10000;

export class OverheadLine {
  constructor() {
    this.node = element("p", {
      class: "ddp-overhead ddp-muted",
      title:
        "Recording: events per step and rank, times the measured cost of one, divided by the step time. " +
        "Kernel: CPU time of this dashboard's thread. Page: time that this page spends on drawing.",
    });
    this.samples = [];
  }

  // found: from the kernel: {events, ns, step, kernel, kept}; busy: milliseconds that the page has spent on drawing
  draw(found, busy) {
    const now = performance.now();
    this.samples.push([now, busy]);
    while (this.samples.length > 2 && now - this.samples[0][0] > WINDOW_MS) this.samples.shift();
    const [from, before] = this.samples[0];
    const page = now - from > 1000 ? (busy - before) / (now - from) : NaN;
    const shares = [share("kernel", found?.kernel), share("page", page)].filter(Boolean);
    setText(
      this.node,
      `Overhead: ${recording(found)}${shares.length ? `; this view uses ${shares.join(" and ")}` : ""}.` +
        `${found?.kept ? ` ${found.kept}` : ""}`,
    );
  }
}

function recording(found) {
  if (!found?.events) return "recording: not known before the first steps";
  const events = `recording ${Math.round(found.events).toLocaleString("en")} events per step and rank`;
  if (!found.ns) return `${events} (their cost was not measured here)`;
  const cost = `${events} × ${found.ns.toFixed(0)} ns`;
  return found.step > 0
    ? `${cost} = ${Number(((found.events * found.ns) / (found.step * 1e4)).toPrecision(2))} % of the step ` +
        `(${significant(found.step)} ms)`
    : cost;
}

function share(name, value) {
  return value === undefined || value === null || Number.isNaN(value)
    ? null
    : `${(100 * value).toFixed(1)} % of a core in the ${name}`;
}
