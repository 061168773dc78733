// Several steps in one picture, and bars that are narrower than a pixel.

import { median } from "../charts/canvas.js";

export const MODES = { one: ["one", 1], over5: ["5 overlaid", 5], over20: ["20 overlaid", 20], row3: ["3 in a row", 3], row10: ["10 in a row", 10], row50: ["50 in a row", 50] };

// The steps to draw, out of `records()`, the newest last, each with the shift of its times: [{record, shift}]
export function chooseSteps(records, shown, mode) {
  const [, wanted] = MODES[mode];
  if (wanted === 1) return [{ record: shown, shift: 0 }];
  const alike = (one) => one.rankCount === shown.rankCount && one.buckets === shown.buckets && one.generation === shown.generation;
  const held = records().filter((one) => one.step < shown.step && one.complete && !one.abandoned && alike(one));
  const chosen = [...held.slice(1 - wanted), shown];
  const inRow = mode.startsWith("row");
  return chosen.map((record) => ({ record, shift: inRow ? (record.began - chosen[0].began) * 1000 : 0 }));
}

// Joins the bars of a row that share a pixel column: the column gets the colour of the part that fills most of it. If they were
// drawn one after the other, the last of them would win, however short it is. The bars of a row are in the order of time.
export function joinNarrow(bars) {
  const made = [];
  let open = null; // the column being filled: {bar, column, shares}
  const close = () => {
    if (!open) return;
    const [part] = [...open.shares].reduce((best, one) => (one[1] > best[1] ? one : best));
    made.push({ ...open.bar, part, x: open.column, width: 1 });
    open = null;
  };
  for (const bar of bars) {
    const column = Math.floor(bar.x);
    const same = open && open.column === column && open.bar.y === bar.y && open.bar.row === bar.row && open.bar.bucket === bar.bucket && open.bar.height === bar.height;
    if (bar.width >= 1) {
      close();
      made.push(bar);
    } else {
      if (!same) {
        close();
        open = { bar, column, shares: new Map() };
      }
      open.shares.set(bar.part, (open.shares.get(bar.part) ?? 0) + bar.width);
    }
  }
  close();
  return made;
}

// The rows (or records) with the newest bucket layout that at least five have; if there is none, with the newest one.
export function judged(rows) {
  const of = (one) => rows.filter((other) => other.generation === one.generation);
  const last = rows.findLast((one) => of(one).length >= 5) ?? rows.at(-1);
  return last ? of(last) : [];
}

// Medians of neighbouring rows, so that at most `most` remain: [{first, last, ...keys}].
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
