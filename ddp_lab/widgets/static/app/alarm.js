// What must not be missed, above every tab: faults on purpose, and training that waits for the reader.

import { asking } from "./life.js";
import { button, element, setText } from "../charts/dom.js";
import { duration } from "../views/step_through.js";

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
    this.pauses.draw(paused.length ? `training waits. ${pauseWords(paused, Date.now() / 1000)}.` : "");
  }
}

// Ranks that pause at the same point in one phrase: "ranks 0–2 pause: bucket 0 is ready, not yet launched (2 s)".
function pauseWords(paused, now) {
  const groups = new Map();
  for (const one of paused) groups.set(one.text, [...(groups.get(one.text) ?? []), one]);
  const phrases = [...groups].map(([text, ranks]) => `${rankNames(ranks.map((one) => one.rank))} ${ranks.length > 1 ? text.replace(/^pauses/, "pause") : text} (${duration(now - Math.min(...ranks.map((one) => one.since)))})`);
  return `${phrases.slice(0, 3).join("; ")}${phrases.length > 3 ? `; and ${phrases.length - 3} more` : ""}`;
}

// [0, 1, 2, 5] -> "ranks 0–2, 5"
export function rankNames(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return `${ranks.length === 1 ? "rank" : "ranks"} ${runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ")}`;
}

class Line {
  constructor(sign, title, role, action) {
    this.text = element("span");
    this.node = element("div", { class: "ddp-alarm", role, "aria-label": title, hidden: true }, element("span", { class: sign ? "ddp-sign" : "ddp-sign ddp-pause-sign", "aria-hidden": "true" }, sign), element("strong", {}, `${title}:`), this.text, asking("ranks", action));
  }

  draw(text) {
    this.node.hidden = !text;
    setText(this.text, text);
  }
}
