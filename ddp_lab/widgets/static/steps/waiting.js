// For whom the others waited: pure functions on step records (view_data.py does the same from a timeline).

import { judged } from "./breakdown.js";

// Milliseconds that all other ranks waited for one alone, by bucket: [{row, ms}] with row = -1 where it is not known.
export function aloneOf(record) {
  if (record.alone) return record.alone;
  const { rankCount, buckets, wait, lastRank, ranks } = record;
  const made = [];
  for (let bucket = 0; bucket < buckets; bucket++) {
    const row = ranks.indexOf(lastRank[bucket]);
    let shortest = Infinity; // of the others' waits: so long was the last rank the only one missing
    for (let other = 0; other < rankCount; other++) {
      if (other !== row) shortest = Math.min(shortest, wait[other * buckets + bucket]);
    }
    made.push(row < 0 || rankCount < 2 || Number.isNaN(shortest) ? { row: -1, ms: 0 } : { row, ms: shortest });
  }
  if (record.complete) record.alone = made;
  return made;
}

// Of steps with the same ranks and buckets: `cells[row][bucket]` mean ms a step, `share[row]` of the collectives in which the
// rank was last, `late[row]` median ms in those, `steps[index].byRank[row]` ms in the bucket that took longest (the waits of a
// step's buckets lie over each other: their sum is no time).
export function waiting(records) {
  const alike = judged(records).filter((one, _, all) => one.rankCount === all.at(-1).rankCount && one.buckets === all.at(-1).buckets);
  const newest = alike.at(-1);
  if (!newest) return null;
  const cells = newest.ranks.map(() => new Float64Array(newest.buckets));
  const when = newest.ranks.map(() => []);
  let collectives = 0;
  const steps = alike.map((record) => {
    const byRank = new Float64Array(newest.rankCount);
    aloneOf(record).forEach(({ row, ms }, bucket) => {
      if (row < 0) return;
      collectives += 1;
      when[row].push(ms);
      cells[row][bucket] += ms / alike.length;
      byRank[row] = Math.max(byRank[row], ms);
    });
    return { step: record.step, byRank };
  });
  const middle = (values) => values.sort((a, b) => a - b)[values.length >> 1] ?? NaN;
  return { ranks: newest.ranks, buckets: newest.buckets, cells, steps, share: when.map((one) => one.length / Math.max(collectives, 1)), late: when.map(middle) };
}
