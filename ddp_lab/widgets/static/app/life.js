// Whether what a widget shows is still the present: its kernel may have ended, or what it shows of it.

import { button, element, setText } from "../charts/dom.js";

const SILENT_MS = 4000; // without a word of a kernel that gives it twice a second while something happens
const ASK_MS = 1200; // after which it is asked for one: that fails where nobody is left to ask
const SAY_MS = 5000; // a page that shows the widget says so as often
const ANSWER_MS = 10000; // after which a greeting that was not answered is told

const ENDS = { restarted: "The kernel was restarted", ended: "The kernel has ended" };

// One for each model: it outlives the views.
export class Life {
  constructor() {
    this.listeners = new Set();
    this.end = "";
    this.id = Math.random().toString(36).slice(2);
    this.heardAt = this.saidAt = performance.now();
    this.seen = false;
    this.promised = false; // the kernel gives its word until it says that this was the last one
    this.greetedAt = null; // since when an answer is waited for
  }

  begin(model) {
    this.model = model;
    this.kernel = model.widget_manager?.kernel ?? null; // JupyterLab and Notebook know how it is; else it is asked
    const heard = (content) => {
      this.heardAt = performance.now();
      this.greetedAt = null;
      if (content?.type === "word") this.promised = !content.last;
    };
    // JupyterLab and Notebook tell it at once. Whoever does not is silent, and that is noticed, too.
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

  // end: what it means that nobody can be asked
  send(command, end = "ended") {
    if (this.end) return;
    try {
      this.model.send(command);
    } catch {
      this.close(end);
    }
  }

  // A view that was made of what the notebook had saved looks alive, and may have nobody to ask: it is answered, or not.
  greet() {
    this.greetedAt = performance.now();
    this.send({ type: "hello" });
  }

  close(end) {
    if (this.end) return;
    this.end = end;
    for (const listener of this.listeners) listener();
  }

  // Whether the widget is in view: the kernel gives its word only then.
  look(seen) {
    if (seen === this.seen) return;
    this.seen = seen;
    this.heardAt = this.saidAt = performance.now();
    this.send(this.here);
  }

  everySecond() {
    if (this.kernel?.isDisposed || this.kernel?.status === "dead") this.close("ended");
    const now = performance.now();
    // Each message keeps a kernel that nobody uses from being ended: none is sent where there is no news.
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

  // {what, remedy, adopt: text of a button, kernel: nobody can be asked, ended: no rank can be} or null while all is well
  get state() {
    const { silence } = this;
    const gone = { kernel: true, ended: true, remedy: "", adopt: "" };
    if (this.end) return { ...gone, what: ENDS[this.end] };
    if (silence) return { ...gone, what: `No word from the kernel for ${silence} s: it has ended, or is too busy` };
    if (this.greetedAt !== null && performance.now() - this.greetedAt > ANSWER_MS) return { ...gone, what: "No answer from the kernel: it is busy, or this page has lost it (then load the page again)" };
    const told = this.model.get("life");
    return told?.what ? { ...told, kernel: false } : null;
  }
}

// What has happened, in words, and a button that helps.
export class LifeLine {
  // adopt(): the reader wants to see the cluster that runs
  constructor(adopt) {
    this.text = element("span");
    this.adopt = button("", null, adopt, { class: "ddp-button ddp-primary", hidden: true });
    this.node = element("div", { class: "ddp-life", role: "status", hidden: true }, this.text, this.adopt);
  }

  // state: of Life; picture: words on what is shown, "" for nothing; again: how a new one is shown after the kernel's end
  draw(state, picture, again) {
    this.node.hidden = !state;
    if (!state) return;
    const remedy = state.remedy || (state.kernel ? again : "");
    const what = picture ? `${state.what}${state.what.includes(":") ? "; " : ": "}this is the last picture, ${picture}` : state.what;
    setText(this.text, `${what}.${remedy ? ` ${remedy}` : ""}`);
    setText(this.adopt, state.adopt);
    this.adopt.hidden = !state.adopt;
  }
}

// Of which step the last picture is, and when that began; shift: from the events' clock to the time of day
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

// Disables the controls in these nodes that have nobody to ask, and says why; enables the others.
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

// Hides the saved picture of this dashboard as long as a live one is on the page (see saved_picture.py).
export function hidePicture(token) {
  const rule = element("style", { "data-ddp-lab": token }, `.ddp-lab-static-${token} { display: none !important; }`);
  document.head.append(rule);
  document.body.classList.add(`ddp-lab-live-${token}`);
  return () => {
    rule.remove();
    if (!document.querySelector(`style[data-ddp-lab="${token}"]`)) document.body.classList.remove(`ddp-lab-live-${token}`);
  };
}
