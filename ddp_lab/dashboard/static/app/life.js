// Whether what a widget shows is current: its kernel may have stopped, or its cluster.

import { button, element, setText } from "../charts/dom.js";
import { watchLostOutputs } from "./lost_outputs.js";

const SILENT_MS = 4000; // without a message from a kernel that sends one twice a second while something happens
const ASK_MS = 1200; // after which the kernel is asked for one: that fails if there is no kernel
const SAY_MS = 5000; // how often a page that shows the widget reports that
const ANSWER_MS = 10000; // after which an unanswered greeting is reported

const ENDS = { restarted: "The kernel was restarted", ended: "The kernel has stopped" };

// One for each model: it outlives the views.
export class Life {
  constructor() {
    this.listeners = new Set();
    this.end = "";
    this.id = Math.random().toString(36).slice(2);
    this.heardAt = this.saidAt = performance.now();
    this.seen = false;
    this.promised = false; // the kernel sends messages regularly until one says that it was the last
    this.greetedAt = null; // when a greeting was sent that is not answered yet
  }

  begin(model) {
    this.model = model;
    watchLostOutputs(model.widget_manager);
    this.kernel = model.widget_manager?.kernel ?? null; // JupyterLab and Notebook know its status; others have to ask
    const heard = (content) => {
      this.heardAt = performance.now();
      this.greetedAt = null;
      if (content?.type === "word") this.promised = !content.last;
    };
    // JupyterLab and Notebook report it at once. Elsewhere the silence shows it.
    const closed = () => this.send(this.here, "restarted");
    const on = { change: () => heard(), "msg:custom": heard, comm_live_update: closed };
    for (const [name, action] of Object.entries(on)) model.on(name, action);
    return () => {
      for (const [name, action] of Object.entries(on)) model.off(name, action);
    };
  }

  get here() {
    return { type: "here", id: this.id, seen: this.seen };
  }

  // end: what a failure to send means
  send(command, end = "ended") {
    if (this.end) return;
    try {
      this.model.send(command);
    } catch {
      this.close(end);
    }
  }

  // A view restored from a saved notebook looks live, but may have no kernel: the answer to a greeting shows it.
  greet() {
    this.greetedAt = performance.now();
    this.send({ type: "hello" });
  }

  close(end) {
    if (this.end) return;
    this.end = end;
    for (const listener of this.listeners) listener();
  }

  // Whether the widget is in view: only then does the kernel send messages.
  look(seen) {
    if (seen === this.seen) return;
    this.seen = seen;
    this.heardAt = this.saidAt = performance.now();
    this.send(this.here);
  }

  everySecond() {
    if (this.kernel?.isDisposed || this.kernel?.status === "dead") this.close("ended");
    const now = performance.now();
    // Each message prevents the culling of an idle kernel: none is sent when nothing happens.
    if (this.kernel && !this.promised && now - this.heardAt > SAY_MS) return;
    if (now - this.saidAt < SAY_MS && now - this.heardAt < ASK_MS) return;
    this.saidAt = now;
    this.send(this.here);
  }

  get silence() {
    const due = this.seen && this.promised;
    const silent = performance.now() - this.heardAt;
    return due && silent > SILENT_MS ? Math.floor(silent / 1000) : 0;
  }

  // {what, remedy, adopt: text of a button, kernel: whether the kernel is lost, ended: whether the ranks are} or null
  // if all is well
  get state() {
    const { silence } = this;
    const gone = { kernel: true, ended: true, remedy: "", adopt: "" };
    if (this.end) return { ...gone, what: ENDS[this.end] };
    if (silence) return { ...gone, what: `No message from the kernel for ${silence} s: it has stopped or is too busy` };
    if (this.greetedAt !== null && performance.now() - this.greetedAt > ANSWER_MS)
      return {
        ...gone,
        what:
          "No answer from the kernel: it is busy, or this page has lost the connection " +
          "(in that case reload the page)",
      };
    const told = this.model.get("status").life;
    return told?.what ? { ...told, kernel: false } : null;
  }
}

// What has happened, in words, and a button to continue.
export class LifeLine {
  // adopt(): the user wants to see the running cluster
  constructor(adopt) {
    this.text = element("span");
    this.adopt = button("", null, adopt, { class: "ddp-button ddp-primary", hidden: true });
    this.node = element("div", { class: "ddp-life", role: "status", hidden: true }, this.text, this.adopt);
  }

  // state: of Life; picture: which picture is shown, "" for none; again: how to get a new widget after the kernel has
  // stopped
  draw(state, picture, again) {
    this.node.hidden = !state;
    if (!state) return;
    const remedy = state.remedy || (state.kernel ? again : "");
    const what = picture
      ? `${state.what}${state.what.includes(":") ? "; " : ": "}this is the last state, ${picture}`
      : state.what;
    setText(this.text, `${what}.${remedy ? ` ${remedy}` : ""}`);
    setText(this.adopt, state.adopt);
    this.adopt.hidden = !state.adopt;
  }
}

// The step of the last picture, and when it began; shift: from the events' clock to the time of day
export function lastPicture(store, shift) {
  const record = store.newest && store.latest(store.newest.reducer);
  if (!record) return "";
  const step = `of step ${record.step.toLocaleString("en")}`;
  return typeof shift === "number" ? `${step}, ${clockTime(record.began + shift)}` : step;
}

export function clockTime(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// Controls that need the kernel ("kernel") or its ranks ("ranks"): they can be disabled together.
export function asking(whom, ...controls) {
  return element("fieldset", { class: "ddp-asks", "data-asks": whom }, ...controls);
}

// Disables the controls in these nodes whose kernel or ranks are lost, and shows why; enables the others.
export function disableDead(nodes, state) {
  for (const fields of nodes.flatMap((node) => [...node.querySelectorAll("[data-asks]")])) {
    const dead = Boolean(state && (state.kernel || (state.ended && fields.dataset.asks === "ranks")));
    fields.disabled = dead;
    for (const one of fields.querySelectorAll("button, input, select")) {
      if (dead) {
        one.dataset.usual ??= one.title;
        one.title = `${state.what}.`;
      } else if (one.dataset.usual !== undefined) {
        one.title = one.dataset.usual;
        delete one.dataset.usual;
      }
    }
  }
}

// Hides the saved picture of this dashboard while a live one is on the page (see saved_picture.py).
export function hidePicture(token) {
  const rule = element("style", { "data-ddp-lab": token }, `.ddp-lab-static-${token} { display: none !important; }`);
  document.head.append(rule);
  document.body.classList.add(`ddp-lab-live-${token}`);
  return () => {
    rule.remove();
    if (!document.querySelector(`style[data-ddp-lab="${token}"]`))
      document.body.classList.remove(`ddp-lab-live-${token}`);
  };
}
