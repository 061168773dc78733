// What each step consists of: pure functions from step records to numbers (view_data.py does the same from a timeline).

import { median } from "../charts/canvas.js";

export const PHASES = [
  { key: "other", name: "other", title: "optimizer, input data and the rest: from the end of the step before, without the phases above it", colour: "#9aa1a9" },
  { key: "forward", name: "forward", title: "the last forward before the backward", colour: "#0072b2" },
  { key: "alone", name: "backward alone", title: "backward's computation while no collective is under way", colour: "#56b4e9" },
  { key: "hidden", name: "hidden communication", title: "backward's computation while collectives are under way behind it", colour: "#009e73" },
  { key: "exposed", name: "exposed communication", title: "communication after the backward's computation: nothing hides it", colour: "#d55e00" },
];

const known = (value) => (Number.isNaN(value) ? 0 : value);

// Medians over the ranks, in milliseconds; null for a step that has not ended on every rank.
export function breakdownOf(record) {
  if (!record.complete || record.abandoned) return null;
  if (record.breakdown) return record.breakdown;
  const rows = record.ranks.map((_, row) => {
    const [begin, finalize, end] = record.bounds.subarray(row * 3, row * 3 + 3);
    const [forwardBegin, forwardEnd, previousEnd] = record.outside.subarray(row * 3, row * 3 + 3);
    const compute = finalize - begin;
    return { forward: forwardEnd - forwardBegin, compute, hidden: Math.min(record.busy[row * 2], compute), exposed: record.busy[row * 2 + 1], step: end - previousEnd };
  });
  const middle = (key) => median(rows.map((row) => row[key]));
  const [forward, compute, hidden, exposed] = ["forward", "compute", "hidden", "exposed"].map((key) => known(middle(key)));
  const told = forward + compute + exposed;
  const whole = middle("step");
  const step = Number.isNaN(whole) ? told : Math.max(whole, told);
  record.breakdown = { step: record.step, generation: record.generation, total: step, other: step - told, forward, alone: Math.max(compute - hidden, 0), hidden, exposed, whole: !Number.isNaN(whole) };
  return record.breakdown;
}

// Share of the step that would remain without exposed communication: 1 is the floor.
export function efficiency(one) {
  return one.total > 0 ? (one.total - one.exposed) / one.total : NaN;
}

// Of rows (or records) those with the last buckets that at least five have; with the newest ones if none have.
export function judged(rows) {
  const of = (one) => rows.filter((other) => other.generation === one.generation);
  const last = rows.findLast((one) => of(one).length >= 5) ?? rows.at(-1);
  return last ? of(last) : [];
}

// Medians of neighbours, so that at most `most` are left: [{first, last, ...keys}].
export function binned(rows, most, keys) {
  const every = Math.max(1, Math.ceil(rows.length / Math.max(most, 1)));
  const made = [];
  for (let index = 0; index < rows.length; index += every) {
    const part = rows.slice(index, index + every);
    const one = { first: part[0].step, last: part.at(-1).step };
    for (const key of keys) one[key] = median(part.map((row) => row[key]));
    made.push(one);
  }
  return made;
}
