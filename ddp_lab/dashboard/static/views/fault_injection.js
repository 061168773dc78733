// Fault injection while training runs.

import { Asker, ModelChoice, NeedsCluster, StatusLine } from "../app/control_status.js";
import {
  button,
  choice,
  element,
  field,
  fill,
  form,
  makeTable,
  number,
  read,
  scrolled,
  section,
  setOptions,
  setText,
} from "../charts/dom.js";

const KINDS = {
  SlowRank: {
    title: "slow rank",
    fields: ["delay"],
    about: "Each forward of the rank takes longer, as with a slower device or slower input.",
    see: "All other ranks wait for it from the first bucket on; “Stragglers” names the rank, before its backward.",
  },
  SlowLayer: {
    title: "slow layer",
    fields: ["parameter", "delay"],
    about: "On the rank, the gradient of one parameter and all later ones are delayed.",
    see: "Buckets before it are on time; its own and later ones are late. “Stragglers” names rank and parameter.",
  },
  SlowLink: {
    title: "slow link",
    fields: ["latency", "rate"],
    about: "Each collective of the rank is delayed, as on a slow network link.",
    see: "The backward takes as long as before, but finalize takes longer; the bucket size changes by how much.",
  },
  DroppedGradient: {
    title: "dropped gradient",
    fields: ["parameter"],
    about:
      "In one backward, the gradient of a parameter is missing on the rank, as if a branch of the model was not used.",
    see: "The next forward fails on all ranks with an error that names the parameter.",
  },
  DeadRank: {
    title: "killed rank",
    fields: [],
    about: "The rank's process is killed (SIGKILL) at its next forward.",
    see:
      "The cell fails on all ranks and names the rank that failed. The next cell, or %cluster rejoin, starts a " +
      "new process for that rank. Its variables are lost.",
  },
};
const SURE_MS = 5000;

// shift: from the events' clock to the time of day; none for recordings from other machines
function when(at, first, shift) {
  return typeof shift === "number"
    ? new Date((at + shift) * 1000).toLocaleTimeString()
    : `${(at - first).toFixed(1)} s after the first`;
}

export class FaultInjectionView {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.asker = new Asker("fault", actions);
    this.status = new StatusLine();
    this.kind = choice(
      "fault",
      Object.entries(KINDS).map(([value, { title }]) => [value, title]),
      () => this.showInputs(),
    );
    this.kind.value = "SlowLayer";
    this.rank = choice("rank", []);
    this.parameter = choice("parameter", []);
    this.delay = number("delay in ms", "50");
    this.latency = number("latency in ms", "5");
    this.rate = number("rate in MB/s", "", { placeholder: "any" });
    this.inputs = {
      parameter: field("gradient of", this.parameter),
      delay: field("by", this.delay, "ms"),
      latency: field("latency", this.latency, "ms"),
      rate: field("rate", this.rate, "MB/s"),
    };
    this.go = button("Inject", "starting with the rank's next forward", () => this.inject(), {
      class: "ddp-button ddp-primary",
    });
    this.about = element("p", { class: "ddp-sentence" });
    this.model = new ModelChoice(actions);
    const row = form(
      () => this.inject(),
      this.model.node,
      field("fault", this.kind),
      field("on", this.rank),
      ...Object.values(this.inputs),
      this.go,
    );
    this.table = makeTable("Active faults", ["rank", "fault", "state", ""]);
    this.none = element("p", { class: "ddp-empty" });
    this.all = button("End all", "before the next forward", () => this.asker.ask({ do: "end" }));
    this.active = element(
      "div",
      { class: "ddp-active" },
      element("div", { class: "ddp-table-scroll" }, this.table.node),
      this.all,
    );
    this.needs = new NeedsCluster(row, this.about, this.status.node, this.active);
    this.past = makeTable("On the timeline, newest first", ["rank", "what", "when"]);
    this.pastNode = scrolled("faults on the timeline", this.past.node, "ddp-past");
    this.node = section(
      "fault-injection",
      "fault injection",
      "Fault injection",
      this.needs.node,
      this.none,
      this.pastNode,
    );
    this.showInputs();
  }

  showInputs() {
    const { fields, about, see } = KINDS[this.kind.value];
    for (const [name, node] of Object.entries(this.inputs)) node.hidden = !fields.includes(name);
    this.about.replaceChildren(element("strong", {}, about), ` What to look for: ${see}`);
    this.calm();
  }

  inject() {
    const kind = this.kind.value;
    // Needs a second click: the rank's variables are lost.
    if (kind === "DeadRank" && !this.sure) {
      this.sure = setTimeout(() => this.calm(), SURE_MS);
      setText(this.go, `Really kill rank ${this.rank.value}?`);
      return;
    }
    this.calm();
    const seconds = (input) => (read(input) === null ? null : read(input) / 1000);
    const values = {
      parameter: { parameter: this.parameter.value },
      delay: { seconds: seconds(this.delay) },
      latency: { latency_seconds: seconds(this.latency) ?? 0 },
      rate: { mb_per_second: read(this.rate) },
    };
    const fault = Object.assign(
      { kind, rank: Number(this.rank.value) },
      ...KINDS[kind].fields.map((name) => values[name]),
    );
    this.asker.ask({ do: "inject", fault, reducer: this.reducer });
  }

  calm() {
    clearTimeout(this.sure);
    this.sure = null;
    setText(this.go, "Inject");
  }

  // facts: of KernelFacts
  draw(facts) {
    const { control, injection: shown, faultMarks: marks } = facts;
    const { model: reducer, current: assignment } = this.model.pick(facts);
    this.reducer = reducer;
    const live = this.needs.draw(control);
    setOptions(
      this.rank,
      (assignment?.group_ranks ?? []).map((rank) => [rank, `rank ${rank}`]),
    );
    setOptions(
      this.parameter,
      (assignment?.parameters ?? []).map((one) => [one.name, one.name]),
    );
    this.go.disabled = !assignment;
    this.status.draw(this.asker.state(control), shown?.said, shown?.error);
    const found = shown?.faults ?? [];
    this.active.hidden = !found.length;
    this.none.hidden = !live || found.length > 0;
    setText(
      this.none,
      assignment
        ? "No active faults. Inject one while a cell is training."
        : "No model yet. Wrap one in ddp_lab.DistributedDataParallel in a %%distributed cell.",
    );
    this.drawActive(found);
    this.pastNode.hidden = !marks.length;
    fill(
      this.past.body,
      marks
        .slice(-40)
        .reverse()
        .map(({ rank, name, at }) => [String(rank), name, when(at, marks[0].at, control?.shift)]),
    );
  }

  drawActive(found) {
    fill(
      this.table.body,
      found.map((one) => [String(one.rank), one.text, one.begun ? "active" : "starts with the next forward"]),
    );
    found.forEach(({ rank, number: which }, index) => {
      const row = this.table.body.rows[index];
      if (row.cells.length < 4) row.append(element("td"));
      const key = `${rank}:${which}`;
      if (row.dataset.key === key) return;
      row.dataset.key = key;
      row.cells[3].replaceChildren(
        button("End", "before the next forward", () => this.asker.ask({ do: "end", rank, number: which })),
      );
    });
  }
}
