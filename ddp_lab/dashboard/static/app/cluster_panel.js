// The cluster: its ranks, updated while they are in view, and buttons to interrupt, rejoin, restart and export.

import { button, element, setText } from "../charts/dom.js";
import { count } from "../charts/theme.js";
import { ClusterTable } from "./cluster_table.js";
import { Asker, StatusLine } from "./control_status.js";
import { clockTime, disableDead, hidePicture, Life, LifeLine } from "./life.js";
import { Presence } from "./presence.js";

const SAY_S = 5; // how often a page that shows the panel reports that to the kernel
const AGAIN = "Start a cluster and run lab.panel() for a new panel.";
const STALE_S = 4; // without a message the state of the ranks is unknown

class PanelView {
  constructor(model, life) {
    this.model = model;
    this.life = life;
    this.id = Math.random().toString(36).slice(2);
    this.seconds = 0;
    this.asker = new Asker("cluster", { send: (command) => this.life.send(command), redraw: () => this.draw() });
    this.build();
  }

  build() {
    const ask = (command) => () => this.asker.ask(command);
    this.summary = element("span", { class: "ddp-muted" });
    this.interrupt = button(
      "Interrupt",
      "Interrupt the running cell on all ranks, even inside a collective",
      ask({ do: "interrupt", ranks: null }),
    );
    this.rejoin = button("Rejoin", "Rebuild the process groups; variables are kept", ask({ do: "rejoin" }));
    this.restart = button("Restart …", "Start new processes; variables are lost", ask({ do: "restart" }));
    this.export = button(
      "Export",
      "Write the cells that have run as a script for torchrun (%cluster export)",
      ask({ do: "export" }),
    );
    this.buttons = element(
      "fieldset",
      { class: "ddp-controls ddp-field", "data-asks": "ranks", "aria-label": "all ranks" },
      this.interrupt,
      this.rejoin,
      this.restart,
      this.export,
    );
    const head = element(
      "div",
      { class: "ddp-toolbar ddp-cluster-head" },
      element("h4", {}, "Cluster"),
      this.summary,
      this.buttons,
    );
    this.question = element("span");
    this.cancel = button("Cancel", "Do not restart", ask({ do: "cancel" }));
    const sure = button("Restart", "All variables on the ranks are lost", ask({ do: "restart", sure: true }), {
      class: "ddp-button ddp-primary",
    });
    const keydown = (event) => event.key === "Escape" && this.cancel.click();
    this.confirm = element(
      "div",
      { class: "ddp-alarm", role: "alertdialog", "aria-label": "Restart?", hidden: true, keydown },
      element("span", { class: "ddp-sign", "aria-hidden": "true" }, "⚠"),
      this.question,
      sure,
      this.cancel,
    );
    this.bar = element("progress", { max: "1", "aria-label": "progress" });
    this.stage = element("span");
    this.progress = element(
      "p",
      { class: "ddp-status ddp-cluster-progress", role: "status", hidden: true },
      this.bar,
      this.stage,
    );
    this.status = new StatusLine();
    this.table = new ClusterTable((rank) => this.asker.ask({ do: "interrupt", ranks: [rank] }));
    this.empty = element("p", { class: "ddp-empty" });
    this.lifeLine = new LifeLine(() => {});
    this.notice = element("div", { class: "ddp-notice", role: "alert", hidden: true });
    this.root = element(
      "div",
      { class: "ddp-lab ddp-cluster", "data-lm-suppress-shortcuts": "true" },
      this.lifeLine.node,
      this.notice,
      head,
      this.confirm,
      this.progress,
      this.status.node,
      this.empty,
      this.table.node,
    );
    this.presence = new Presence(this.root, {
      seen: () => this.looked(),
      show: () => this.draw(),
      theme: () => {},
      second: () => this.everySecond(),
    });
  }

  get seen() {
    return this.presence.inView && !document.hidden;
  }

  // Tells the kernel whether the panel is in view: otherwise it does not query the ranks.
  looked() {
    if (!this.seen && this.told === false) return;
    this.told = this.seen;
    this.seconds = 0;
    this.life.send({ type: "look", id: this.id, seen: this.seen });
  }

  everySecond() {
    if (!this.seen) return;
    this.seconds += 1;
    if (this.seconds >= SAY_S) this.looked();
    this.draw();
  }

  mount(target) {
    target.append(this.root);
    this.changed = () => this.draw();
    this.came = () => {
      this.cameAt = performance.now();
      this.cameOn = Date.now() / 1000;
    };
    this.came();
    this.life.listeners.add(this.changed);
    this.model.on("change:about", this.came);
    this.model.on("change", this.changed);
    this.visibility = () => this.looked();
    document.addEventListener("visibilitychange", this.visibility);
    this.presence.begin();
    this.looked();
    this.draw();
  }

  unmount() {
    this.presence.end();
    this.looked();
    this.life.listeners.delete(this.changed);
    document.removeEventListener("visibilitychange", this.visibility);
    this.model.off("change:about", this.came);
    this.model.off("change", this.changed);
    this.root.remove();
  }

  draw() {
    if (!this.presence.inView) return;
    const about = this.model.get("about");
    const control = this.model.get("control");
    const past = this.life.end ? this.life.state : null;
    const elapsed = (performance.now() - this.cameAt) / 1000;
    const changing = Boolean(control.doing) && !past;
    const busy = new Set(about.busy ?? []);
    const rows = about.running ? this.model.get("ranks").map((row) => ({ ...row, busy: busy.has(row.rank) })) : [];
    this.drawTable(rows, elapsed, changing || Boolean(past));
    this.empty.hidden = about.running || changing;
    setMarked(this.empty, about.why ?? "");
    this.buttons.hidden = !about.running;
    for (const one of [this.interrupt, this.rejoin, this.restart, this.export]) one.disabled = changing;
    this.interrupt.classList.toggle("ddp-primary", busy.size > 0);
    setText(this.summary, rows.length ? summary(rows, about) : "");
    this.drawControl(past ? {} : control, changing);
    this.lifeLine.draw(past, rows.length ? `of ${clockTime(this.cameOn)}` : "", AGAIN);
    disableDead([this.root], past);
    const due = about.running || !about.why; // messages are expected: the ranks run, or none has arrived yet
    this.drawNotice(due && !changing && !past && elapsed > STALE_S ? Math.floor(elapsed) : 0);
  }

  // old: the ranks are changing, or the cluster or the kernel is lost
  drawTable(rows, elapsed, old) {
    this.table.node.hidden = !rows.length;
    this.table.node.classList.toggle("ddp-cluster-old", old);
    if (rows.length) this.table.draw(rows, elapsed, old || elapsed > STALE_S);
  }

  drawControl(control, changing) {
    const question = changing ? "" : (control.confirm ?? "");
    const opens = question && this.confirm.hidden;
    this.confirm.hidden = !question;
    setText(this.question, question);
    if (opens && this.root.contains(document.activeElement)) this.cancel.focus({ preventScroll: true });
    this.progress.hidden = !changing;
    if (changing) {
      this.bar.value = control.fraction;
      setText(
        this.stage,
        `${control.doing === "rejoin" ? "Rejoining" : "Restarting"}${control.stage ? `: ${control.stage}` : ""} …`,
      );
    }
    this.status.draw(
      changing ? null : this.asker.state(control),
      changing ? "" : control.said,
      changing ? "" : control.error,
    );
  }

  drawNotice(seconds) {
    const text =
      this.model.get("notice") || (seconds ? `No message from the kernel for ${seconds} s. Is it running?` : "");
    this.notice.hidden = !text;
    setText(this.notice, text);
  }
}

// Writes text in which `this` is code.
function setMarked(node, text) {
  if (node.marked === text) return;
  node.marked = text;
  node.replaceChildren(...text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part)));
}

function summary(rows, about) {
  const states = new Map();
  for (const { state } of rows) states.set(state, (states.get(state) ?? 0) + 1);
  const parts = [...states].map(([state, number]) => `${number} ${state}`);
  return `${about.name} · ${count(rows.length, "rank")} · ${about.backend} · ${parts.join(", ")}`;
}

export default () => {
  const life = new Life();
  return {
    initialize({ model }) {
      return life.begin(model);
    },
    render({ model, el }) {
      const view = new PanelView(model, life);
      view.mount(el);
      const show = hidePicture(model.get("token"));
      return () => {
        view.unmount();
        show();
      };
    },
  };
};
