// The model as nested cells from left to right, as wide as they are large: model_map.py for the browser.

function joined(node) {
  // A module with a single child, itself a module, is shown as one cell.
  const children = [...node.children.values()];
  if (children.length === 1 && !children[0].parameter && node.name) {
    return joined({ ...children[0], name: `${node.name}.${children[0].name}` });
  }
  return { ...node, children: children.map(joined) };
}

function tree(assignment, equal) {
  const bucketOf = new Map(assignment.buckets.flatMap((one) => one.parameters.map((index) => [index, one.bucket])));
  const root = { name: "", path: "", children: new Map(), weight: 0, buckets: new Set() };
  for (const parameter of assignment.parameters) {
    const bucket = bucketOf.get(parameter.index) ?? -1;
    const weight = equal ? 1 : Math.max(parameter.bytes, 1);
    const parts = parameter.name.split(".");
    let node = root;
    parts.forEach((name, depth) => {
      node.weight += weight;
      node.buckets.add(bucket);
      const path = parts.slice(0, depth + 1).join(".");
      if (!node.children.has(name)) node.children.set(name, { name, path, children: new Map(), weight: 0, buckets: new Set() });
      node = node.children.get(name);
    });
    node.weight += weight;
    node.buckets.add(bucket);
    node.parameter = parameter;
  }
  return joined(root);
}

function depthOf(node) {
  return 1 + Math.max(0, ...node.children.map(depthOf));
}

// [{depth, rows, begin, end, name, path, parameter: index | -1, bucket: its only bucket | -1}] with 0 ≤ begin < end ≤ 1, and how
// many rows there are. `root`: path of the module that fills the width; `equal`: every parameter is as wide as the others.
export function mapCells(assignment, { root = "", equal = false } = {}) {
  const whole = tree(assignment, equal);
  const find = (node) => (node.path === root ? node : node.children.map(find).find(Boolean));
  const top = (root && find(whole)) || whole;
  const depth = depthOf(top);
  const cells = [];
  const place = (node, level, begin, scale) => {
    const end = begin + node.weight * scale;
    const [only] = node.buckets;
    const leaf = node.parameter !== undefined;
    cells.push({
      depth: level,
      rows: leaf ? depth - level : 1,
      begin,
      end,
      name: node.name || assignment.module,
      path: node.path,
      parameter: leaf ? node.parameter.index : -1,
      bucket: node.buckets.size === 1 ? only : -1,
    });
    let at = begin;
    for (const child of node.children) at = place(child, level + 1, at, scale);
    return end;
  };
  place(top, 0, 0, 1 / Math.max(top.weight, 1));
  return { cells, depth };
}
