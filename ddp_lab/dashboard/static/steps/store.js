// The kernel's messages, and the steps that the browser holds: bounded, shared by all views of a dashboard.

import { BLOCKS } from "../generated.js";

// `view` is the DataView (or ArrayBuffer) that travelled; each record copies its part, so that one step kept does not
// keep the whole message.
export function decodeSteps(header, view) {
  const buffer = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : view;
  let offset = 0;
  return header.steps.map((head) => {
    const record = { ...head, rankCount: head.ranks.length };
    const sizes = { R: record.rankCount, B: head.buckets, D: Number(head.device) };
    const start = offset;
    for (const [name, shape] of BLOCKS) {
      const count = shape.match(/[RBD]|\d+/g).reduce((product, one) => product * (sizes[one] ?? Number(one)), 1);
      record[name] = new Float32Array(buffer.slice(offset, offset + count * 4));
      offset += count * 4;
    }
    if (!head.device) record.device = null;
    record.size = offset - start + 512;
    return record;
  });
}

const MAX_STEPS = 500;
const MAX_BYTES = 32 * 1024 * 1024;
const LONG_MS = 100; // a step that takes longer is shown while it grows

export class StepStore {
  // marks: MarkStore
  constructor(marks) {
    this.marks = marks;
    this.gradients = null; // the kernel's last answer about a bucket's gradients
    this.reducers = new Map(); // reducer -> Map(step -> record), in order of arrival
    this.newest = null; // the record of the backward that began last, of whichever model
    this.chosen = null; // {between, reducer, held: Map}: the steps of a part of the run, which the kernel sent
    this.bytes = 0;
    this.received = 0;
    this.listeners = new Set();
  }

  add(records) {
    const now = performance.now();
    for (const record of records) {
      const held = this.reducers.get(record.reducer) ?? new Map();
      this.reducers.set(record.reducer, held);
      const previous = held.get(record.step);
      record.arrived = previous ? previous.arrived : now;
      this.bytes += record.size - (previous ? previous.size : 0);
      held.set(record.step, record);
      if (!this.newest || record.began >= this.newest.began) this.newest = record;
      this.forget(held);
    }
    this.received += 1;
    this.changed("steps");
  }

  // The kernel's answer to a choice of steps: perhaps several messages.
  addChosen(records, between) {
    const { reducer } = records[0] ?? {};
    if (String(this.chosen?.between) !== String(between) || this.chosen.reducer !== reducer)
      this.chosen = { between, reducer, held: new Map() };
    for (const record of records) this.chosen.held.set(record.step, { ...record, arrived: performance.now() });
    this.changed();
  }

  // The steps of a model, in order; between: [first, last] or null for those that came last.
  records(reducer, between) {
    const held = this.reducers.get(reducer) ?? new Map();
    const more = between && this.chosen?.reducer === reducer ? this.chosen.held : new Map();
    const known = new Map([...more, ...held]);
    const found = [...known.values()].sort((a, b) => a.step - b.step);
    return between ? found.filter(({ step }) => step >= between[0] && step <= between[1]) : found;
  }

  forget(held) {
    while (held.size > MAX_STEPS || (this.bytes > MAX_BYTES && held.size > 1)) {
      const step = Math.min(...held.keys());
      this.bytes -= held.get(step).size;
      held.delete(step);
    }
  }

  // The timeline was cleared.
  reset() {
    this.reducers.clear();
    this.marks.reset();
    this.gradients = null;
    this.newest = this.chosen = null;
    this.bytes = 0;
    this.changed("reset");
  }

  take(gradients) {
    this.gradients = gradients;
    this.changed();
  }

  // what: "steps" if only steps have come, "reset" if all were forgotten
  changed(what) {
    for (const listener of this.listeners) listener(what);
  }

  get(reducer, step) {
    const chosen = this.chosen?.reducer === reducer ? this.chosen.held : null;
    return this.reducers.get(reducer)?.get(step) ?? chosen?.get(step);
  }

  // The newest complete step; or a later one that takes long, even if it is incomplete: it never ends if a rank hangs.
  latest(reducer) {
    let complete = null;
    let growing = null;
    const now = performance.now();
    for (const record of this.reducers.get(reducer)?.values() ?? []) {
      const finished = record.complete && !record.abandoned;
      if (finished && (!complete || record.step > complete.step)) complete = record;
      const long = now - record.arrived > LONG_MS;
      if (!finished && long && (!growing || record.step > growing.step)) growing = record;
    }
    if (growing && (!complete || growing.step > complete.step)) return growing;
    return complete ?? this.records(reducer).at(-1) ?? null;
  }
}

const TAKE = {
  steps: (store, content, buffers) =>
    content.between
      ? store.addChosen(decodeSteps(content, buffers[0]), content.between)
      : store.add(decodeSteps(content, buffers[0])),
  reset: (store) => store.reset(),
  "forget marks": (store) => store.marks.reset(),
  marks: (store, content) => store.marks.add(content.marks),
  gradients: (store, content) => store.take(content),
};

export function takeMessage(store, content, buffers) {
  TAKE[content.type]?.(store, content, buffers);
}
