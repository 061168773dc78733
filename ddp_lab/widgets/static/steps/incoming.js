// What the kernel sends, by type: each message goes into the store.

import { decodeSteps } from "./decode.js";

const TAKE = {
  steps: (store, content, buffers) => store.add(decodeSteps(content, buffers[0])),
  reset: (store) => store.reset(),
  "forget marks": (store) => store.marks.reset(),
  marks: (store, content) => store.marks.add(content.marks),
  gradients: (store, content) => store.take(content),
};

export function takeMessage(store, content, buffers) {
  TAKE[content.type]?.(store, content, buffers);
}
