// A collective, step by step: the picture of the parts on each rank, and the player's position.

import { COLOURS, RANK_COLOURS } from "../generated.js";
import { bytes, milliseconds } from "./theme.js";

// Colours of text on RANK_COLOURS: beyond eight ranks they repeat, and only the place within the cell differs.
const INKS = ["#fff", "#000", "#000", "#000", "#000", "#000", "#000", "#000"];
const [LEFT, TOP, FOOT] = [50, 26, 40];
const [STRIP_TOP, STRIP, AXIS] = [34, 56, 34];

const round = (value) => Math.round(value * 10) / 10;
const colour = (rank) => RANK_COLOURS[rank % RANK_COLOURS.length];

// Ranks in a number with a bit for each (at most 16).
export function holders(bits, ranks) {
  return Array.from({ length: ranks }, (_, rank) => rank).filter((rank) => (bits >> rank) & 1);
}

// The parts on each rank as SVG: a column per rank, a cell per part, a colour per contribution in it.
export class Stage {
  // shown: a collective as sent by the kernel; width: in pixels
  constructor(shown, width) {
    this.shown = shown;
    this.width = width;
    const { ranks } = shown;
    this.column = Math.min((width - LEFT) / ranks, 280);
    this.gap = Math.max(8, 0.14 * this.column);
    this.cell = this.column - this.gap;
    this.row = ranks <= 4 ? 28 : ranks <= 8 ? 20 : 13;
    this.gridHeight = TOP + ranks * this.row + FOOT;
    this.height = this.gridHeight + STRIP_TOP + STRIP + AXIS;
    this.states = [shown.begin, ...shown.steps.map((step) => step.holds)];
    // The ranks that can contribute to a part: those that have data in it at the start.
    this.slots = shown.begin.map((_, part) =>
      holders(
        shown.begin.reduce((sum, parts) => sum | parts[part], 0),
        ranks,
      ),
    );
    this.sent = sums(shown);
    this.most = Math.max(...this.sent.at(-1), 1);
    this.longest = Math.max(...shown.steps.map((step) => step.ms), 1e-6);
  }

  x(rank) {
    return LEFT + rank * this.column;
  }

  y(part) {
    return TOP + part * this.row;
  }

  // The picture after this many steps.
  still(done) {
    const { ranks } = this.shown;
    const parts = [];
    for (let rank = 0; rank < ranks; rank++) {
      parts.push(
        `<rect x="${round(this.x(rank))}" y="4" width="12" height="12" fill="${colour(rank)}" class="ddp-chip"/>`,
      );
      parts.push(text(this.x(rank) + 17, 11, this.column < 62 ? String(rank) : `rank ${rank}`));
      for (let part = 0; part < ranks; part++) parts.push(this.drawCell(rank, part, this.states[done][rank][part]));
    }
    for (let part = 0; part < ranks; part++)
      parts.push(text(LEFT - 8, this.y(part) + this.row / 2 - 1, `part ${part}`, "end", "ddp-faint"));
    return parts.join("");
  }

  drawCell(rank, part, bits) {
    const [x, y, height] = [this.x(rank), this.y(part), this.row - 4];
    const whole = this.slots[part].every((one) => (bits >> one) & 1);
    const frame =
      `<rect x="${round(x)}" y="${y}" width="${round(this.cell)}" height="${height}" ` +
      `class="ddp-cell${whole ? " ddp-whole" : ""}"/>`;
    return `<g data-rank="${rank}" data-part="${part}">${frame}${this.fills(bits, part, x, y)}</g>`;
  }

  // The contributions, each at its place in the cell.
  fills(bits, part, x, y) {
    const slots = this.slots[part];
    const wide = (this.cell - 2) / slots.length;
    const height = this.row - 6;
    return slots
      .map((rank, slot) => {
        if (!((bits >> rank) & 1)) return "";
        const left = x + 1 + slot * wide;
        const size = `width="${round(Math.max(wide - (slots.length > 1 ? 1 : 0), 1))}" height="${height}"`;
        const box = `<rect x="${round(left)}" y="${y + 1}" ${size} fill="${colour(rank)}"/>`;
        const digits =
          wide >= 12 && height >= 12
            ? text(left + wide / 2, y + 1 + height / 2, String(rank), "middle", "", INKS[rank % INKS.length])
            : "";
        return box + digits;
      })
      .join("");
  }

  // The data that moves in a step: [{markup, from, to}], positions in pixels.
  travelling(step) {
    const before = this.states[step - 1];
    return this.shown.steps[step - 1].transfers.flatMap(([source, target, parts, places]) =>
      parts.map((part, index) => {
        const markup =
          `<rect x="0" y="0" width="${round(this.cell)}" height="${this.row - 4}" ` +
          `class="ddp-block"/>${this.fills(before[source][part], part, 0, 0)}`;
        return { markup, from: [this.x(source), this.y(part)], to: [this.x(target), this.y(places[index])] };
      }),
    );
  }

  // Arrows of the transfers of a step, above the cells.
  arrows(step) {
    return this.shown.steps[step - 1].transfers
      .flatMap(([source, target, parts, places]) =>
        parts.map((part, index) => this.arrow(source, target, part, places[index])),
      )
      .join("");
  }

  arrow(source, target, part, place) {
    const right = target > source;
    const [y, end] = [part, place].map((one) => this.y(one) + (this.row - 4) / 2);
    const from = this.x(source) + (right ? this.cell : 0);
    const to = this.x(target) + (right ? 0 : this.cell);
    const bend = Math.abs(target - source) > 1 ? this.row * 0.45 : 0;
    const tip = `${round(to)} ${round(end)}`;
    const line = `M${round(from)} ${round(y)}Q${round((from + to) / 2)} ${round((y + end) / 2 - 2 * bend)} ${tip}`;
    const head = `M${tip}l${right ? -6 : 6} -3.5v7z`;
    return `<path class="ddp-arrow" d="${line}"/><path class="ddp-arrow-head" d="${head}"/>`;
  }

  // The bytes that each rank has sent so far; `at` may be within a step.
  bars(at) {
    const [before, after] = [this.sent[Math.floor(at)], this.sent[Math.ceil(at)]];
    const y = TOP + this.shown.ranks * this.row + 4;
    return (
      before
        .map((first, rank) => {
          const now = first + (after[rank] - first) * (at - Math.floor(at));
          const x = this.x(rank);
          const bar = (width, kind) =>
            `<rect x="${round(x)}" y="${y}" width="${round(width)}" height="5" class="ddp-${kind}"/>`;
          const bars = bar(this.cell, "track") + bar((this.cell * now) / this.most, "sent");
          return bars + text(x, y + 15, this.cell < 44 ? short(now) : bytes(Math.round(now)));
        })
        .join("") + text(LEFT - 8, y + 6, "sent", "end", "ddp-faint")
    );
  }

  // The time of each step, as columns that can be chosen.
  strip(current) {
    const { steps } = this.shown;
    const top = this.gridHeight + STRIP_TOP;
    const wide = Math.min((this.width - LEFT - 8) / Math.max(steps.length, 1), 60);
    const parts = [text(LEFT, top - 20, "time of each step, ms", "start", "ddp-faint")];
    const every = Math.max(1, Math.ceil(18 / wide));
    steps.forEach((step, index) => {
      const x = LEFT + index * wide;
      const height = Math.max((STRIP * step.ms) / this.longest, 1);
      const bar =
        `<rect x="${round(x + 1)}" y="${round(top + STRIP - height)}" width="${round(Math.max(wide - 3, 1))}" ` +
        `height="${round(height)}" fill="${step.adds ? COLOURS.adds : COLOURS.replaces}"/>`;
      const mark =
        index + 1 === current
          ? `<rect x="${round(x + 1)}" y="${top + STRIP + 2}" width="${round(Math.max(wide - 3, 1))}" ` +
            `height="3" class="ddp-ink"/>`
          : "";
      const number =
        index % every === 0 ? text(x + wide / 2, top + STRIP + 12, String(index + 1), "middle", "ddp-faint") : "";
      const value =
        wide >= 30 ? text(x + wide / 2, top + STRIP - height - 7, milliseconds(step.ms), "middle", "ddp-faint") : "";
      const area =
        `<rect x="${round(x)}" y="${top - 12}" width="${round(wide)}" ` + `height="${STRIP + 30}" fill="transparent"/>`;
      parts.push(`<g data-step="${index + 1}" class="ddp-step">${bar}${mark}${number}${value}${area}</g>`);
    });
    parts.push(text(LEFT, top + STRIP + 27, "step: ", "start", "ddp-faint"), ...key(LEFT + 34, top + STRIP + 27));
    return parts.join("");
  }
}

function key(x, y) {
  return [
    [COLOURS.adds, "adds the received data"],
    [COLOURS.replaces, "replaces the old data"],
  ].flatMap(([fill, name], index) => {
    const left = x + index * 126;
    return [
      `<rect x="${left}" y="${y - 5}" width="10" height="10" fill="${fill}"/>`,
      text(left + 15, y, name, "start", "ddp-faint"),
    ];
  });
}

// Bytes sent by rank after each number of steps.
function sums(shown) {
  const made = [new Array(shown.ranks).fill(0)];
  for (const step of shown.steps) {
    const next = [...made.at(-1)];
    step.transfers.forEach(([source], index) => (next[source] += step.bytes[index]));
    made.push(next);
  }
  return made;
}

function short(value) {
  return bytes(Math.round(value)).replace(/\.\d+/, "").replace("iB", "");
}

function text(x, y, content, anchor = "start", style = "", fill = null) {
  const place = `x="${round(x)}" y="${round(y)}" text-anchor="${anchor}" dominant-baseline="central"`;
  const escaped = content.replace(/[&<]/g, (one) => (one === "&" ? "&amp;" : "&lt;"));
  return `<text ${place} class="${style}"${fill ? ` style="fill: ${fill}"` : ""}>${escaped}</text>`;
}

const STEP_MS = 1400; // at normal speed

// At rest after a step, or on the way to another.
export class Player {
  // show(): the position has changed; alive(): false stops it
  constructor(show, alive) {
    this.show = show;
    this.alive = alive;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.speed = 1;
    this.load(0);
  }

  load(count) {
    this.count = count;
    this.at = 0; // steps done; a fraction: within the next one
    this.until = null; // where it goes
  }

  get moving() {
    return this.until !== null;
  }

  // The last step that has begun, from 1; 0 before the first.
  get step() {
    return Math.ceil(this.at);
  }

  toggle() {
    if (this.moving) this.pause();
    else if (this.count) {
      if (this.at >= this.count) this.at = 0;
      this.run(this.count);
    }
  }

  pause() {
    this.until = null;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.show();
  }

  forward() {
    if (this.at < this.count) this.run(Math.floor(this.at) + 1);
  }

  back() {
    this.go(Math.ceil(this.at) - 1);
  }

  go(step) {
    this.at = Math.min(Math.max(step, 0), this.count);
    this.pause();
  }

  run(until) {
    this.pause();
    this.until = until;
    // Without motion a step is a jump; of several each stays for a while.
    if (this.calm.matches) this.jump();
    else {
      this.last = null;
      this.frame = requestAnimationFrame((now) => this.tick(now));
    }
    this.show();
  }

  jump() {
    if (!this.moving || !this.alive()) return this.pause();
    this.at = Math.min(Math.floor(this.at) + 1, this.count);
    if (this.at >= this.until) return this.pause();
    this.show();
    this.timer = setTimeout(() => this.jump(), STEP_MS / this.speed);
  }

  tick(now) {
    if (!this.moving || !this.alive()) return this.pause();
    // A page that was in the background does not leap.
    this.at += (Math.min(now - (this.last ?? now), 100) / STEP_MS) * this.speed;
    this.last = now;
    if (this.at >= this.until) {
      this.at = this.until;
      return this.pause();
    }
    this.show();
    this.frame = requestAnimationFrame((later) => this.tick(later));
  }
}
