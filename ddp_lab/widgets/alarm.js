// What must not be missed, above every tab: faults on purpose, and training that waits for the reader.

import { button } from "./control_status.js";
import { duration } from "./step_through_view.js";
import { element, setText } from "./theme.js";

export class Alarm {
  // actions: {send(command)}
  constructor(actions) {
    this.faults = new Line("⚠", "Rehearsal", "alert", button("End all", "all faults end before the next forward", () => actions.send({ type: "fault", id: "", do: "end" })));
    this.pauses = new Line("", "Paused", "group", button("Continue", "no breakpoints: train at full speed", () => actions.send({ type: "step", id: "", do: "continue", reducer: null })));
    this.node = element("div", { class: "ddp-alarms" }, this.faults.node, this.pauses.node);
  }

  // stepping, rehearsal: of the kernel; live: whether the controls have a cluster
  draw(live, stepping, rehearsal) {
    const faults = live ? (rehearsal?.faults ?? []) : [];
    const several = faults.length > 1 ? `${faults.length} faults on purpose` : "a fault on purpose";
    this.faults.draw(faults.length ? `${several}: ${faults.slice(0, 3).map((one) => `rank ${one.rank}: ${one.text}`).join("; ")}${faults.length > 3 ? "; …" : ""}.` : "");
    const paused = live ? (stepping?.ranks ?? []).filter((one) => one.kind === "paused") : [];
    const text = paused.slice(0, 2).map((one) => `rank ${one.rank} ${one.text} (for ${duration(Date.now() / 1000 - one.since)})`);
    this.pauses.draw(paused.length ? `training waits. ${text.join("; ")}${paused.length > 2 ? "; …" : ""}.` : "");
  }
}

class Line {
  constructor(sign, title, role, action) {
    this.text = element("span");
    this.node = element("div", { class: "ddp-alarm", role, "aria-label": title, hidden: true }, element("span", { class: sign ? "ddp-sign" : "ddp-sign ddp-pause-sign", "aria-hidden": "true" }, sign), element("strong", {}, `${title}:`), this.text, action);
  }

  draw(text) {
    this.node.hidden = !text;
    setText(this.text, text);
  }
}
