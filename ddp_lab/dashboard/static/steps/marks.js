// Annotations of the program (recording.mark), and the phases of a rank outside its backward.

const MOST = 5000; // marks kept for each rank
const MOST_FAULTS = 400;
const REST = "optimizer, rest";

export class MarkStore {
  constructor() {
    this.byRank = new Map();
    this.count = 0; // of all that came
    this.faults = []; // [{rank, at, name, fault: "begin" | "end" | "once"}]: injected faults, in order of arrival
  }

  // marks: [[rank, seconds, name, kind of fault mark or null], ...], in order for each rank
  add(marks) {
    this.count += marks.length;
    for (const [rank, at, name, fault] of marks) {
      if (fault) this.faults = [...this.faults.slice(1 - MOST_FAULTS), { rank, at, name, fault }];
      if (!this.byRank.has(rank)) this.byRank.set(rank, []);
      const held = this.byRank.get(rank);
      held.push({ at, name });
      if (held.length > MOST) held.splice(0, MOST / 5);
    }
  }

  reset() {
    this.byRank.clear();
    this.faults = [];
  }

  // [{at: seconds, name, fault}] of the lowest rank, and every fault
  all() {
    const lowest = Math.min(...this.byRank.keys());
    const named = (this.byRank.get(lowest) ?? []).filter(({ name }) => !this.faults.some((one) => one.name === name));
    return [...named, ...this.faults];
  }

  // Names of the faults that a rank had in a step. They begin and end before its forward.
  faultsIn(record, row) {
    if (!this.faults.length) return [];
    const [, , previousEnd] = record.outside.subarray(row * 3, row * 3 + 3);
    const [begin, , end] = record.bounds.subarray(row * 3, row * 3 + 3);
    const first = Number.isNaN(previousEnd) ? begin - 100 : previousEnd;
    const last = Number.isNaN(end) ? Infinity : end;
    const found = new Set();
    for (const { rank, at: seconds, name, fault } of this.faults) {
      const at = (seconds - record.began) * 1000;
      if (rank !== record.ranks[row] || at > last) continue;
      if (fault === "begin" || (fault === "once" && at >= first)) found.add(name);
      else if (fault === "end" && at < begin) found.delete(name.slice("end of ".length));
    }
    return [...found];
  }

  // [{at, name}] of a rank, in milliseconds of the record's common axis, of first ≤ at < last
  of(record, row, first, last) {
    const held = this.byRank.get(record.ranks[row]) ?? [];
    const found = [];
    for (let index = held.length - 1; index >= 0; index--) {
      const at = (held[index].at - record.began) * 1000;
      if (at < first) break;
      if (at < last) found.unshift({ at, name: held[index].name });
    }
    return found;
  }
}

// [{name, begin, end, kind: "other" | "forward"}] from the end of the previous step to the backward's begin. An
// annotation names the time after it, until the next annotation or event.
export function outsideSpans(record, row, marks) {
  const [forwardBegin, forwardEnd, previousEnd] = record.outside.subarray(row * 3, row * 3 + 3);
  const begin = record.bounds[row * 3];
  const until = Number.isNaN(forwardBegin) ? begin : forwardBegin;
  const found = [...named(record, row, marks, previousEnd, until, REST)];
  if (!Number.isNaN(forwardBegin) && !Number.isNaN(forwardEnd)) {
    found.push({ name: "forward", begin: forwardBegin, end: forwardEnd, kind: "forward" });
    found.push(...named(record, row, marks, forwardEnd, begin, "loss, rest"));
  }
  return found;
}

function named(record, row, marks, from, to, first) {
  if (Number.isNaN(to)) return [];
  const inside = marks.of(record, row, Number.isNaN(from) ? to - 1e4 : from, to);
  const points = Number.isNaN(from) ? inside : [{ at: from, name: first }, ...inside];
  return points.map(({ at, name }, index) => ({ name, begin: at, end: points[index + 1]?.at ?? to, kind: "other" }));
}

// Where the step begins on the axis: at the end of the previous step, but without long idle time, which would squeeze
// the rest.
export function wholeBegin(record) {
  let earliest = 0;
  record.ranks.forEach((_, row) => {
    const [forwardBegin, , previousEnd] = record.outside.subarray(row * 3, row * 3 + 3);
    const forward = Number.isNaN(forwardBegin) ? 0 : forwardBegin;
    const length = (record.bounds[row * 3 + 2] || 0) - forward;
    earliest = Math.min(earliest, forward, Number.isNaN(previousEnd) ? 0 : Math.max(previousEnd, forward - 2 * length));
  });
  return earliest;
}
