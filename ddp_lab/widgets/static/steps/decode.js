// One message of type "steps" -> records of typed arrays, one for each block of step_messages.py.

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
