// Several steps in one picture, and bars that are narrower than a pixel.

export const MODES = {
  one: ["one", 1],
  over5: ["5 overlaid", 5],
  over20: ["20 overlaid", 20],
  row3: ["3 in a row", 3],
  row10: ["10 in a row", 10],
  row50: ["50 in a row", 50],
};

// The steps to draw, out of `records()`, the newest last, each with the shift of its times: [{record, shift}]
export function chooseSteps(records, shown, mode) {
  const [, wanted] = MODES[mode];
  if (wanted === 1) return [{ record: shown, shift: 0 }];
  const alike = (one) =>
    one.rankCount === shown.rankCount && one.buckets === shown.buckets && one.generation === shown.generation;
  const held = records().filter((one) => one.step < shown.step && one.complete && !one.abandoned && alike(one));
  const chosen = [...held.slice(1 - wanted), shown];
  const inRow = mode.startsWith("row");
  return chosen.map((record) => ({ record, shift: inRow ? (record.began - chosen[0].began) * 1000 : 0 }));
}

// Joins the bars of a row that share a pixel column: the column gets the colour of the part that fills most of it. If
// they were drawn one after the other, the last of them would win, however short it is. The bars of a row are in the
// order of time.
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
    const same =
      open &&
      open.column === column &&
      open.bar.y === bar.y &&
      open.bar.row === bar.row &&
      open.bar.bucket === bar.bucket &&
      open.bar.height === bar.height;
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
