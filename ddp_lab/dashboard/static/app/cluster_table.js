// The table of the ranks: one row each, updated in place; durations advance between two messages.

import { button, element, makeTable, scrolled, setRows, setText } from "../charts/dom.js";
import { bytes, duration } from "../charts/theme.js";

const LATE_S = 2; // without a message from a rank
const LOST_S = 10;
const COLUMNS = [
  { name: "rank" },
  { name: "state" },
  { name: "device" },
  {
    name: "memory",
    title: "resident memory of the rank's process, shared pages included",
    text: (row) => size(row.memory),
  },
  {
    name: "CPU",
    title: "CPU time of the rank's process, in percent of one core; more than 100 % if its threads use several cores",
    percent: (row) => row.cpu,
  },
  {
    name: "GPU memory",
    title: "used memory of the whole device, by all processes",
    gpu: true,
    text: (row) => (row.gpuUsed === null ? "–" : `${size(row.gpuUsed)} of ${size(row.gpuTotal)}`),
  },
  { name: "GPU", title: "share of the last second in which the device was busy", gpu: true, percent: (row) => row.gpu },
  { name: "step", title: "last step seen", text: (row) => (row.step === null ? "–" : row.step.toLocaleString("en")) },
  {
    name: "in flight",
    title: "collectives that the rank has launched and that are not complete",
    text: (row) => unbroken(row.inFlight) || "–",
  },
  { name: "heartbeat", title: "time since the last message from the rank; it is queried twice a second" },
  { name: "" },
];
const STATE = 1;
const DEVICE = 2;
const HEARTBEAT = 9;
const ACTION = 10;

function size(value) {
  return value === null ? "–" : bytes(value);
}

// Keeps numbers and their units on one line.
function unbroken(text) {
  return text.replace(/(\d) (?=[A-Za-z])/g, "$1\u00a0");
}

export class ClusterTable {
  // interrupt(rank): interrupts a rank
  constructor(interrupt) {
    this.interrupt = interrupt;
    this.table = makeTable(
      "Ranks",
      COLUMNS.map(({ name, title }) => (title ? [name, title] : name)),
    );
    this.node = scrolled("ranks", this.table.node, "ddp-cluster-ranks");
  }

  // rows: of cluster_panel/rows.py; elapsed: seconds since they arrived; stale: whether they are out of date
  draw(rows, elapsed, stale) {
    const gpus = rows.some((row) => row.gpuTotal !== null || row.gpu !== null);
    this.table.node.classList.toggle("ddp-no-gpu", !gpus);
    setRows(this.table.body, rows.length, () => this.makeRow());
    rows.forEach((row, index) => this.drawRow(this.table.body.rows[index], row, elapsed, stale));
  }

  makeRow() {
    const cells = COLUMNS.map((_, index) => element(index ? "td" : "th", index ? {} : { scope: "row" }));
    COLUMNS.forEach((column, index) => {
      if (column.percent)
        cells[index].append(
          element("span", { class: "ddp-meter", "aria-hidden": "true" }, element("i")),
          element("span", { class: "ddp-percent" }),
        );
    });
    cells[STATE].append(element("span"));
    cells[DEVICE].append(element("span"), element("span", { class: "ddp-device-model" }));
    cells[HEARTBEAT].append(element("span"));
    const made = element("tr", {}, ...cells);
    cells[ACTION].append(button("Interrupt", "", () => this.interrupt(made.rank)));
    return made;
  }

  drawRow(node, row, elapsed, stale) {
    node.rank = row.rank;
    const { cells } = node;
    setText(cells[0], String(row.rank));
    cells[0].title = row.where;
    this.drawState(cells[STATE].firstChild, row, elapsed, stale);
    const [device, more] = cells[DEVICE].children;
    const [name, ...rest] = row.device.split(" ");
    setText(device, name);
    setText(more, rest.length ? ` ${rest.join(" ")}` : "");
    cells[DEVICE].title = row.device;
    COLUMNS.forEach((column, index) => {
      if (column.text) setText(cells[index], column.text(row));
      if (column.percent) drawPercent(cells[index], column.percent(row));
    });
    this.drawHeartbeat(cells[HEARTBEAT].firstChild, row, elapsed, stale);
    const action = cells[ACTION].firstChild;
    action.hidden = !row.busy;
    action.title = `Interrupt the running cell on rank ${row.rank}; ranks that wait for it are unblocked`;
    action.setAttribute("aria-label", `Interrupt rank ${row.rank}`);
  }

  drawState(node, row, elapsed, stale) {
    node.className = `ddp-state ddp-state-${row.state}`;
    const since = row.seconds === null || stale ? "" : ` for ${duration(row.seconds + elapsed)}`;
    setText(node, row.words + since);
    node.parentElement.title = row.hint || row.words;
  }

  drawHeartbeat(node, row, elapsed, stale) {
    const age = row.silent === null ? null : row.silent + elapsed;
    const kind = age === null || stale ? "none" : age < LATE_S ? "good" : age < LOST_S ? "late" : "lost";
    node.className = `ddp-heartbeat ddp-heartbeat-${kind}`;
    setText(node, age === null ? "–" : stale ? "?" : duration(age));
  }
}

function drawPercent(cell, value) {
  const [meter, text] = cell.children;
  meter.hidden = value === null;
  meter.firstChild.style.width = `${Math.min(value ?? 0, 100)}%`;
  setText(text, value === null ? "–" : `${value.toFixed(0)} %`);
}
