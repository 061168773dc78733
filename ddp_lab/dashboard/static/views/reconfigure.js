// Changes buckets and comm hook while training runs, and compares the steps before and after the change.

import { Asker, NeedsCluster, StatusLine } from "../app/control_status.js";
import { Blocks } from "../charts/blocks.js";
import { button, choice, element, field, form, number, read, setText } from "../charts/dom.js";

const ORDERS = [
  ["", "unchanged"],
  ["ready", "order of readiness"],
  ["reversed", "reverse registration"],
  ["registration", "registration"],
];
const HOOKS = ["none", "fp16", "bf16", "powersgd"];
const TITLE = "Change buckets or comm hook while training runs";
const TITLE_OF_THE_PAST = "Changes of buckets or comm hook during training";
const WAYS = [
  ["", "unchanged"],
  ["cap", "one limit for all"],
  ["first", "first bucket and limit"],
  ["list", "list of limits"],
];

export class ReconfigureForm {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.asker = new Asker("reconfigure", actions);
    this.status = new StatusLine();
    this.way = choice("bucket size limits", WAYS, () => this.showInputs());
    this.first = number("size limit of the first bucket in MiB", "1");
    this.cap = number("size limit of a bucket in MiB", "25");
    this.list = element("input", {
      type: "text",
      class: "ddp-text",
      "aria-label": "size limits in MiB in launch order",
      placeholder: "1, 5, 25",
      size: "14",
    });
    this.order = choice("order of the parameters", ORDERS);
    const id = `ddp-hooks-${Math.random().toString(36).slice(2)}`;
    this.hook = element("input", {
      type: "text",
      class: "ddp-text",
      "aria-label": "comm hook",
      placeholder: "unchanged",
      list: id,
      size: "11",
      title: "none, fp16, bf16, powersgd, or a name defined with DistributedDataParallel.register_named_comm_hook",
    });
    const names = element("datalist", { id }, ...HOOKS.map((value) => element("option", { value })));
    this.apply = button("Apply", "apply the change between two steps (Enter)", () => this.ask(), {
      class: "ddp-button ddp-primary",
    });
    this.back = button(
      "Change back",
      "restore limits, order and hook from before the last change; a second measurement makes the result more reliable",
      () => this.asker.ask({ back: true, reducer: this.reducer }),
    );
    this.inputs = {
      cap: field("size limit", this.cap, "MiB"),
      first: field("first", this.first, "MiB"),
      list: field("size limits", this.list, "MiB"),
    };
    const row = form(
      () => this.ask(),
      field("bucket size", this.way),
      this.inputs.first,
      this.inputs.cap,
      this.inputs.list,
      field("order", this.order),
      field("comm hook", this.hook, names),
      this.apply,
      this.back,
    );
    this.needs = new NeedsCluster(row, this.status.node);
    this.verdict = element("p", { class: "ddp-sentence ddp-verdict-line", role: "status" });
    this.blocks = new Blocks(actions);
    this.node = element(
      "details",
      { class: "ddp-reconfigure", "aria-label": "change buckets while training runs", open: true },
      element("summary", { tabindex: "0" }, TITLE),
      this.needs.node,
      this.verdict,
      this.blocks.node,
    );
    this.showInputs();
  }

  showInputs() {
    const way = this.way.value;
    this.inputs.cap.hidden = way !== "cap" && way !== "first";
    this.inputs.first.hidden = way !== "first";
    this.inputs.list.hidden = way !== "list";
  }

  ask() {
    const way = this.way.value;
    const change = { order: this.order.value || null, comm_hook: this.hook.value.trim() || null };
    if (way === "cap" || way === "first") change.bucket_cap_mb = read(this.cap);
    if (way === "first") change.first_bucket_mb = read(this.first);
    if (way === "list")
      change.bucket_cap_mb_list = this.list.value
        .split(/[,;\s]+/)
        .filter(Boolean)
        .map(Number);
    this.asker.ask({ change, reducer: this.reducer });
  }

  // shown: {state, text, compared} from the kernel; possible: whether there are ranks
  draw(reducer, assignment, control, shown, possible) {
    this.needs.node.hidden = !possible;
    setText(this.node.firstChild, possible ? TITLE : TITLE_OF_THE_PAST);
    this.reducer = reducer;
    const live = this.needs.draw(control);
    const compared = shown?.compared?.reducer === reducer ? shown.compared : undefined;
    const under = shown?.state === "asked";
    const state = this.asker.state(control);
    this.apply.disabled = under || state === "asked";
    this.back.hidden = !compared?.blocks.length;
    this.back.disabled = this.apply.disabled;
    this.status.draw(state, shown?.state === "failed" ? "" : shown?.text, shown?.state === "failed" ? shown.text : "");
    this.node.hidden = !live && !control?.stopped && !compared?.blocks.length;
    if (assignment && this.seen !== assignment.generation) {
      this.seen = assignment.generation;
      const caps = assignment.options?.bucket_cap_mb_list;
      setPlaceholder(this.hook, assignment.options?.comm_hook ?? "none");
      if (caps?.length)
        setPlaceholder(this.list, [...new Set(caps)].map((cap) => Number(cap.toPrecision(4))).join(", "));
    }
    this.verdict.hidden = !compared?.blocks.length;
    setText(this.verdict, compared?.text ?? "");
    this.blocks.draw(compared?.blocks ?? []);
  }
}

function setPlaceholder(input, text) {
  if (input.placeholder !== text) input.placeholder = text;
}
