// The kernel's data about a model, besides its steps.

import { BUCKET_WORDS, VIEWS } from "../generated.js";

const ASK_MS = 700; // between two requests for the gradients of a bucket

const entryOf = (assignment, bucket) => assignment?.buckets.find((one) => one.bucket === bucket);

// The words for a bucket layout, which come with it; assignment: undefined if it is not known.
export function layoutWords(assignment) {
  const words = assignment?.words ?? BUCKET_WORDS;
  const names = new Map((assignment?.buckets ?? []).map((one) => [one.bucket, one.name]));
  const cell = (number) => names.get(number) ?? String(number);
  return {
    ...words,
    name: (number) => names.get(number) ?? `${words.unit} ${number}`,
    titled: (number) => names.get(number) ?? `${words.title} ${number}`,
    where: (number) => `${words.unit} ${cell(number)}`,
    cell,
    short: (number) => names.get(number) ?? `b${number}`,
    // What a map of modules does not say already.
    tags: (number) => (words.named ? [] : [`b${number}`]),
  };
}

export class KernelFacts {
  // send(command): to the kernel
  constructor(model, store, send) {
    this.model = model;
    this.send = send;
    this.store = store;
    this.asked = { text: "", at: 0, bucket: null, reducer: null }; // for the gradients of a bucket
    this.worded = undefined; // the layout of which the words are kept
    this.keptWords = null;
  }

  // The facts of a view if they are about this model, else undefined.
  of(view, reducer) {
    const found = this.model.get("facts")[view];
    return found && found.reducer === reducer ? found : undefined;
  }

  // What the page's parts say of the whole: see dashboard.py.
  status(part) {
    return this.model.get("status")[part];
  }

  get assignments() {
    return this.model.get("models").assignments ?? {};
  }

  // What the panels draw besides the record; record: null before the first step.
  all(record) {
    return { ...this.free(record?.reducer), ...(record ? this.ofRecord(record) : {}) };
  }

  // What does not depend on a step.
  free(reducer) {
    const models = this.models();
    const model = reducer === undefined ? models.at(-1) : models.find((one) => one.reducer === reducer);
    const {
      collectives: collective,
      step: stepping,
      fault_injection: injection,
      reconfiguration,
      watching,
      what_if: prediction,
      trial,
    } = this.model.get("facts");
    const own = { collective, stepping, injection, reconfiguration, watching, prediction, trial };
    const [control, ranks, means] = [this.model.get("control"), this.model.get("ranks"), this.status("means")];
    // Of a view; undefined before the kernel's first answer.
    const blocksOf = (view) =>
      (VIEWS[view].model ? this.of(view, reducer ?? model?.reducer) : this.model.get("facts")[view])?.blocks;
    return {
      ...own,
      blocksOf,
      control,
      ranks,
      means,
      models,
      current: model,
      model: reducer ?? model?.reducer ?? null,
      faultMarks: this.store.marks.faults,
    };
  }

  // The newest bucket layout of each model, the newest model last.
  models() {
    const newest = new Map();
    for (const one of Object.values(this.assignments)) {
      if (one && !(newest.get(one.reducer)?.generation > one.generation)) newest.set(one.reducer, one);
    }
    return [...newest.values()].sort((a, b) => a.reducer - b.reducer);
  }

  ofRecord(record) {
    const { reducer, generation } = record;
    return {
      assignment: this.assignmentOf(record),
      words: this.words(record),
      inspection: this.of("inspection", reducer),
      overview: this.of("overview", reducer),
      findings: this.of("findings", reducer),
      readiness: this.of("buckets", reducer),
      link: this.model.get("models").links?.[`${reducer}:${generation}`],
    };
  }

  // [[reducer, its displayed name], ...]
  titles() {
    const assignments = Object.values(this.assignments);
    return [...this.store.reducers.keys()].map((id) => {
      const name = assignments.find((one) => one.reducer === id)?.module;
      return [id, name ? `${name} (model ${id})` : `model ${id}`];
    });
  }

  // A bucket with its parameters, or undefined.
  bucket(record, bucket) {
    const assignment = this.assignmentOf(record);
    const entry = entryOf(assignment, bucket);
    if (!entry) return undefined;
    const parameters = entry.parameters.map((index) => assignment.parameters[index]);
    return { ...entry, parameters, words: layoutWords(assignment) };
  }

  assignmentOf(record) {
    return this.assignments[`${record.reducer}:${record.generation}`];
  }

  // Of the layout of a step: for each frame and each tooltip, so that they are kept while it is the same.
  words(record) {
    const assignment = this.assignmentOf(record);
    if (assignment !== this.worded || !this.keptWords) {
      this.worded = assignment;
      this.keptWords = layoutWords(assignment);
    }
    return this.keptWords;
  }

  // When each gradient of the chosen bucket was ready; requested when the user chooses it, and regularly during
  // training.
  gradients(record, bucket) {
    if (bucket === null) return undefined;
    const text = JSON.stringify([record.reducer, record.step, bucket]);
    const now = performance.now();
    const other = this.asked.bucket !== bucket || this.asked.reducer !== record.reducer;
    if (text !== this.asked.text && record.complete && (other || now - this.asked.at > ASK_MS)) {
      this.asked = { text, at: now, bucket, reducer: record.reducer };
      this.send({ type: "gradients", reducer: record.reducer, step: record.step, bucket });
    }
    const found = this.store.gradients;
    return found &&
      found.reducer === record.reducer &&
      found.bucket === bucket &&
      found.generation === record.generation
      ? found
      : undefined;
  }
}
