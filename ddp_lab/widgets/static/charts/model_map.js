// The model as nested cells from left to right: those of model_map.py, or one of them with what is inside it.

// [{depth, rows, begin, end, name, path, parameter: index | -1, bucket: its only bucket | -1}] with 0 ≤ begin < end ≤ 1, and how
// many rows there are. `root`: path of the module that fills the width; `equal`: every parameter is as wide as the others.
export function mapCells({ cells }, { root = "", equal = false } = {}) {
  const all = cells.map(([name, path, parameter, bucket, depth, ...edges]) => ({ name, path, parameter, bucket, depth, begin: edges[equal ? 2 : 0], end: edges[equal ? 3 : 1] }));
  const top = all.find((one) => one.path === root) ?? all[0];
  const inside = all.filter((one) => one === top || !top.path || one.path.startsWith(`${top.path}.`));
  const depth = 1 + Math.max(...inside.map((one) => one.depth)) - top.depth;
  const scale = 1 / (top.end - top.begin || 1);
  const made = inside.map((one) => {
    const level = one.depth - top.depth;
    return { ...one, depth: level, rows: one.parameter < 0 ? 1 : depth - level, begin: (one.begin - top.begin) * scale, end: (one.end - top.begin) * scale };
  });
  return { cells: made, depth };
}
