// Gradient monitoring: starts and stops it, above what the kernel shows of it.

import { Asker, NeedsCluster, StatusLine } from "../app/control_status.js";
import { Blocks } from "../charts/blocks.js";
import { button, element, field, number, read, section, setText } from "../charts/dom.js";

const COST =
  "Monitoring has a cost: a monitored step reads each bucket twice more (0.13 ms per MiB on one CPU core) " +
  "and gathers some numbers; a comparison reads all parameters once (0.3 ms per MiB).";
const NONE =
  "No step has been monitored. Start monitoring above, or call model.watch_gradients(every=10) in the training code.";
const NONE_HERE = "No step has been monitored. Call model.watch_gradients(every=10) in the training code.";

export class GradientsView {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.asker = new Asker("watch", actions);
    this.status = new StatusLine();
    this.buildControls();
    this.summary = element("p", { class: "ddp-sentence", role: "status" });
    this.blocks = new Blocks(actions);
    this.node = section("gradients", "gradients", "Gradients", this.needs.node, this.summary, this.blocks.node);
  }

  buildControls() {
    this.every = number("monitor gradients every N steps", "10", { min: "1", step: "1" });
    this.apart = number("compare replicas every N steps", "100", { min: "1", step: "1" });
    const ask = (command) => this.asker.ask({ ...command, reducer: this.reducer });
    this.watch = button("Monitor", "starting within the next steps", () =>
      ask({ do: "gradients", every: read(this.every) ?? 0 }),
    );
    this.unwatch = button("Stop", "stop monitoring", () => ask({ do: "gradients", every: 0 }));
    this.compare = button("Compare", "starting within the next steps", () =>
      ask({ do: "drift", every: read(this.apart) ?? 0 }),
    );
    this.uncompare = button("Stop", "stop comparing", () => ask({ do: "drift", every: 0 }));
    this.now = button("Check now", "between two steps while a cell trains, otherwise immediately", () =>
      ask({ do: "check" }),
    );
    this.row = element(
      "div",
      { class: "ddp-toolbar ddp-form" },
      element("span", { class: "ddp-field" }, field("gradients every", this.every, " steps"), this.watch, this.unwatch),
      element(
        "span",
        { class: "ddp-field" },
        field("replicas every", this.apart, " steps"),
        this.compare,
        this.uncompare,
        this.now,
      ),
    );
    const cost = element("p", { class: "ddp-sentence ddp-muted" }, COST);
    this.needs = new NeedsCluster(this.row, this.status.node, cost);
  }

  // blocks: from the kernel, undefined before its first answer; watching: of its controls; step: the chosen one
  draw(reducer, control, watching, blocks, step) {
    this.reducer = reducer;
    const live = this.needs.draw(control);
    for (const one of this.row.querySelectorAll("button")) one.disabled = reducer === null;
    this.unwatch.disabled ||= !watching?.gradients;
    this.uncompare.disabled ||= !watching?.drift;
    const state = live ? current(watching) : "";
    const withState = (text) => text && [text, state].filter(Boolean).join(" ");
    this.status.draw(this.asker.state(control), withState(watching?.said) || state, withState(watching?.error));
    this.summary.hidden = Boolean(blocks?.some(({ scene }) => scene));
    setText(
      this.summary,
      reducer === null ? "No model yet. Wrap one in ddp_lab.DistributedDataParallel." : live ? NONE : NONE_HERE,
    );
    this.blocks.draw(blocks ?? [], step);
  }

  forgetTheme() {
    this.blocks.forgetTheme();
  }
}

function current(watching) {
  if (!watching) return "";
  const parts = [];
  if (watching.gradients) parts.push(`Gradients of every ${ordinal(watching.gradients)} step are monitored.`);
  if (watching.drift) parts.push(`Replicas are compared before every ${ordinal(watching.drift)} step.`);
  if (watching.pending) parts.push("A request takes effect within the next steps.");
  return parts.join(" ");
}

function ordinal(value) {
  if (value === 1) return "single";
  const last = value % 100 > 10 && value % 100 < 14 ? 0 : value % 10;
  return `${value}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}
