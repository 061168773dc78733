// A cell that runs in the background, or longer than this page is open: its progress, a stop button, its result.

import { button, element, setText } from "../charts/dom.js";
import { hidePicture, Life } from "./life.js";

const STALE_S = 6; // a running cell reports its status every second
const ENDED = ["done", "failed", "interrupted", "not run"];
const shown = new Set(); // tokens of the widgets that this page has made: a widget that is made again has missed output

// The text below the line is in boxes of limited height (background_cell.css), which scroll to its end unless the
// reader has scrolled up.
class Boxes {
  area = null; // JupyterLab's node of the cell's outputs

  find(root) {
    this.area ??= root.closest(".jp-OutputArea");
    if (!this.area) return;
    if (!this.observer) {
      this.away = new WeakSet(); // boxes in which the reader has scrolled up
      this.looked = ({ target: box }) =>
        box.scrollTop + box.clientHeight < box.scrollHeight - 8 ? this.away.add(box) : this.away.delete(box);
      this.area.addEventListener("scroll", this.looked, true);
      this.observer = new MutationObserver(() => this.showEnds());
      this.observer.observe(this.area, { childList: true, characterData: true, subtree: true });
    }
    this.showEnds();
  }

  showEnds() {
    for (const box of this.area.querySelectorAll(
      ".jp-OutputArea-child:has(.ddp-boxing) ~ .jp-OutputArea-child .jp-RenderedText",
    )) {
      if (!this.away.has(box) && box.scrollHeight > box.clientHeight) box.scrollTop = box.scrollHeight;
    }
  }

  end() {
    this.observer?.disconnect();
    this.area?.removeEventListener("scroll", this.looked, true);
  }
}

class BackgroundView {
  // late: whether the page has missed what the cell printed while it was closed
  constructor(model, life, late) {
    this.model = model;
    this.life = life;
    this.late = late;
    this.boxes = new Boxes();
    this.asked = false;
    this.sign = element("span", { class: "ddp-sign", "aria-hidden": "true" });
    this.words = element("span", { role: "status" });
    this.stop = button("■ Stop", "Interrupt this cell on all its ranks", () => this.interrupt());
    this.text = element("pre", { class: "ddp-late-text", tabindex: "0", "aria-label": "the end of the cell's output" });
    const { state, now } = model.get("status");
    const ran = !ENDED.includes(state) || performance.timeOrigin / 1000 < now;
    const title = ran ? "End of the output (this page was opened while the cell ran)" : "End of the output";
    this.missed = element(
      "details",
      { class: "ddp-twin", hidden: true, open: ran },
      element("summary", {}, title),
      this.text,
    );
    const kind = model.get("waited") ? "ddp-waited" : "ddp-boxing";
    this.root = element(
      "div",
      { class: `ddp-lab ddp-background ${kind}` },
      element("p", { class: "ddp-background-line" }, this.sign, this.words, this.stop),
      this.missed,
    );
  }

  mount(target) {
    target.append(this.root);
    this.came();
    this.changed = () => this.came();
    this.left = () => this.draw();
    this.model.on("change:status", this.changed);
    this.life.listeners.add(this.left);
    this.tick = setInterval(() => this.everySecond(), 1000);
  }

  unmount() {
    clearInterval(this.tick);
    this.model.off("change:status", this.changed);
    this.life.listeners.delete(this.left);
    this.boxes.end();
    this.root.remove();
  }

  interrupt() {
    this.asked = true;
    this.life.send({ type: "interrupt" });
    this.draw();
  }

  everySecond() {
    if (!ENDED.includes(this.model.get("status").state)) this.life.everySecond();
    this.draw();
  }

  came() {
    this.cameAt = performance.now();
    const { state, now } = this.model.get("status");
    // The cell started before this page was opened; found without comparing two clocks.
    this.late ||= !ENDED.includes(state) && 1000 * (now - this.model.get("began")) > this.cameAt;
    this.draw();
  }

  draw() {
    const { state } = this.model.get("status");
    const ended = ENDED.includes(state);
    const silent = (performance.now() - this.cameAt) / 1000;
    const lost = !ended && (Boolean(this.life.end) || silent > STALE_S);
    this.root.classList.toggle("ddp-unseen", this.model.get("waited") && !this.late);
    this.boxes.find(this.root);
    setText(this.words, this.line(ended, lost, silent));
    this.root.dataset.state = lost ? "lost" : state;
    this.stop.hidden = ended || lost;
    this.stop.disabled = this.asked;
    this.drawMissed();
  }

  // The cell's progress; silent: seconds since the kernel's last message
  line(ended, lost, silent) {
    const label = this.model.get("label");
    if (this.life.end && !ended)
      return `${label}: connection lost. ${this.life.state.what}; ${this.model.get("if_lost")}.`;
    const { headline, step } = this.model.get("status");
    const parts = [`${label}: ${headline}`];
    if (step !== null && step !== undefined) parts.push(`step ${step.toLocaleString("en")}`);
    if (lost) parts.push(`no message from the kernel for ${Math.round(silent)} s`);
    else if (this.asked && !ended) parts.push("stopping …");
    return parts.join(" · ");
  }

  drawMissed() {
    const lines = this.model.get("lines");
    this.missed.hidden = !this.late || !lines;
    if (this.missed.hidden) return;
    if (this.text.textContent !== lines) {
      this.toEnd ||= this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
      setText(this.text, lines);
    }
    if (!this.toEnd || !this.text.clientHeight) return; // it is not on the page yet
    this.text.scrollTop = this.text.scrollHeight;
    this.toEnd = false;
  }
}

export default () => {
  const life = new Life();
  let late = false;
  return {
    initialize({ model }) {
      const token = model.get("token");
      const { state } = model.get("status");
      late = shown.has(token) || (ENDED.includes(state) && performance.timeOrigin / 1000 > model.get("began"));
      shown.add(token);
      return life.begin(model);
    },
    render({ model, el }) {
      const view = new BackgroundView(model, life, late);
      view.mount(el);
      const show = hidePicture(model.get("token"));
      return () => {
        view.unmount();
        show();
      };
    },
  };
};
