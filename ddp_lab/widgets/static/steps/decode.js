// One message of type "steps" -> records of typed arrays. The blocks are those of messages.py, in the same order.

const BLOCKS = [
  ["bounds", (r) => r * 3],
  ["outside", (r) => r * 3], // forward begin, forward end, end of the step before
  ["busy", (r) => r * 2], // milliseconds of hidden and of exposed communication
  ["times", (r, b) => r * b * 4],
  ["wait", (r, b) => r * b],
  ["hidden", (r, b) => r * b],
  ["exposed", (r, b) => r * b],
  ["lastLaunched", (r, b) => b],
  ["lastRank", (r, b) => b],
  ["allReduce", (r, b) => b],
  ["bandwidth", (r, b) => b],
  ["bytes", (r, b) => b],
];

// `view` is the DataView (or ArrayBuffer) that travelled; each record copies its part, so that one step kept does not
// keep the whole message.
export function decodeSteps(header, view) {
  const buffer = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : view;
  let offset = 0;
  const take = (count) => {
    const part = new Float32Array(buffer.slice(offset, offset + count * 4));
    offset += count * 4;
    return part;
  };
  return header.steps.map((head) => {
    const ranks = head.ranks.length;
    const record = { ...head, hiddenFraction: head.hidden, rankCount: ranks, start: offset };
    for (const [name, count] of BLOCKS) record[name] = take(count(ranks, head.buckets));
    record.device = head.device ? take(ranks * head.buckets * 2) : null;
    record.size = offset - record.start + 512;
    return record;
  });
}
