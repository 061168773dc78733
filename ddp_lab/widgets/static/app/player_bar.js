// Of a replay: play and pause, how far it is, how fast it goes.

import { asking } from "./life.js";
import { element, setText } from "../charts/dom.js";

const SPEEDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5];

export class PlayerBar {
  // send(command): to the kernel
  constructor(send) {
    this.send = (asked) => send({ type: "player", ...asked });
    this.button = button("", null, () => this.send({ playing: !this.state.playing }), { class: "ddp-button ddp-primary ddp-play" });
    this.range = element("input", { type: "range", min: "0", max: "1000", value: "0", class: "ddp-range", "aria-label": "moment of the recording" });
    this.range.addEventListener("input", () => {
      this.held = true; // the reader moves it: what the kernel says of it waits
      this.write(this.chosen);
    });
    // Not "change" alone: there is none if the reader moves it away and back.
    for (const end of ["change", "pointerup", "pointercancel", "blur"]) this.range.addEventListener(end, () => this.release());
    this.time = element("span", { class: "ddp-muted ddp-played" });
    this.speeds = SPEEDS; // and whatever else it has been set to
    this.speed = choice("speed of the replay", [], () => this.send({ speed: Number(this.speed.value) }));
    const speed = element("label", { class: "ddp-field", title: "1: as fast as it was" }, "speed ", this.speed);
    const steps = element("span", { class: "ddp-field ddp-steps" }, this.button, this.range, this.time);
    this.node = element("div", { class: "ddp-toolbar ddp-player", role: "toolbar", "aria-label": "replay", hidden: true }, asking("kernel", steps, speed));
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
    setOptions(this.speed, this.speeds.map((one) => [one, `${one} ×`]));
    if (this.speed.value !== String(state.speed)) this.speed.value = String(state.speed);
    if (this.held) return;
    this.range.value = String(Math.round((1000 * state.position) / state.seconds));
    this.write(state.position);
  }
}
