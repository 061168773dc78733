// Collectives: which rank holds which part, and how parts move between ranks; recorded on real ranks, replayed here.

import { asking } from "../app/life.js";
import { Blocks } from "../charts/blocks.js";
import { holders, Player, Stage } from "../charts/collective.js";
import { button, choice, element, field, onKey, section, setOptions, setText, spoken, Tip } from "../charts/dom.js";
import { tipOf } from "../charts/pen.js";
import { bytes, count } from "../charts/theme.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4];
const KEYS =
  "Space: play or pause. Left and right: step. Home, End: first and last. Plus, minus: speed. Up and down: " +
  "what each rank holds.";
const RUN = "Run it on the ranks several times, with real tensors";

export class CollectivesView {
  // actions: {send(command), redraw(), say(text)}
  constructor(actions) {
    this.actions = actions;
    this.player = new Player(
      () => this.paint(),
      () => this.node.isConnected,
    );
    this.buildControls();
    this.state = element("div", { class: "ddp-sentence", role: "status" });
    this.notice = element("div", { class: "ddp-notice", role: "alert", hidden: true });
    this.now = element("div", { class: "ddp-summary ddp-now" });
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("role", "img");
    const layer = () => this.svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "g"));
    this.still = layer();
    this.arrows = layer();
    this.moving = layer();
    this.bars = layer();
    this.strip = layer();
    this.tip = new Tip();
    const listeners = {
      keydown: (event) => this.key(event),
      click: (event) => this.click(event),
      pointermove: (event) => this.hover(event),
      pointerleave: () => this.tip.hide(),
    };
    this.chart = element(
      "div",
      {
        class: "ddp-chart ddp-stage",
        tabindex: "0",
        role: "application",
        "aria-label": `Collective, step by step. ${KEYS}`,
        ...listeners,
      },
      this.svg,
      this.tip.node,
    );
    this.twin = new Blocks(actions);
    this.lesson = element(
      "p",
      { class: "ddp-sentence ddp-muted" },
      "A column is a rank's buffer, divided into parts. A colour in a part is the contribution of the rank " +
        "of that colour, as found in the received numbers. A strong frame marks a part with all contributions.",
    );
    this.content = element("div", {}, this.player_, this.now, this.chart, this.lesson, this.twin.node);
    this.node = section("collectives", "collectives", "Collectives", this.ask_, this.notice, this.state, this.content);
  }

  buildControls() {
    this.collective = choice("collective", [], () => this.chooseCollective());
    this.algorithm = choice("algorithm", [], () => this.ask());
    this.size = choice("bytes of the buffer on each rank", [], () => this.ask());
    this.run = button("Run on the ranks", RUN, () => this.ask());
    this.busy = element("span", { class: "ddp-muted" });
    this.ask_ = element(
      "div",
      { class: "ddp-toolbar", role: "group", "aria-label": "collective to run" },
      asking(
        "ranks",
        field("collective", this.collective),
        field("algorithm", this.algorithm),
        field("buffer", this.size),
        this.run,
      ),
      this.busy,
    );
    const { player } = this;
    const step = (text, title, action) => button(text, title, action, { "aria-label": title });
    this.play = button("▶ Play", "play or pause (Space)", () => player.toggle());
    this.steps = element("input", {
      type: "range",
      min: "0",
      value: "0",
      step: "1",
      class: "ddp-range",
      "aria-label": "steps done",
      input: () => player.go(Number(this.steps.value)),
    });
    this.speed = choice(
      "speed",
      SPEEDS.map((one) => [one, `${one} ×`]),
      () => (player.speed = Number(this.speed.value)),
    );
    this.speed.value = "1";
    this.held = element("span", { class: "ddp-muted ddp-held" });
    this.player_ = element(
      "div",
      { class: "ddp-toolbar", role: "group", "aria-label": "steps" },
      element(
        "span",
        { class: "ddp-field ddp-steps" },
        this.play,
        step("‹", "one step back (left)", () => player.back()),
        this.steps,
        step("›", "one step forward (right)", () => player.forward()),
        this.held,
      ),
      field("speed", this.speed),
    );
  }

  // told: {state, text, number, shown, choices, sizes, bytes}, see collectives.py; without choices there are no ranks
  draw(told) {
    if (!told?.choices) return;
    this.told = told;
    const ranks = Object.keys(told.choices).length > 0;
    this.ask_.hidden = !ranks;
    if (ranks) this.fillControls(told);
    const text = `${told.number} ${told.state} ${told.text} ${ranks}`;
    const width = Math.floor(this.chart.clientWidth);
    this.run.disabled = told.state === "running" || Boolean(told.busy);
    if (this.run.dataset.usual === undefined) this.run.title = told.busy || RUN;
    this.busy.hidden = !told.busy || told.state === "failed";
    setText(this.busy, told.busy ?? "");
    this.notice.hidden = told.state !== "failed";
    setText(this.notice, told.state === "failed" ? told.text : "");
    this.content.hidden = told.shown === null;
    if (text !== this.text) setText(this.state, sentence(told));
    this.text = text;
    if (told.shown === null || (told.number === this.number && width === this.stage?.width)) return;
    if (told.number !== this.number) {
      this.player.load(told.shown.steps.length);
      this.number = told.number;
      this.twin.draw(told.shown.blocks);
    }
    // When first shown, it has no width yet.
    const wide = Math.floor(this.chart.clientWidth);
    if (wide < 40) return this.actions.redraw();
    this.stage = new Stage(told.shown, wide);
    this.svg.setAttribute("viewBox", `0 0 ${wide} ${this.stage.height}`);
    this.svg.setAttribute("height", String(this.stage.height));
    this.painted = null;
    this.paint();
    this.node.dataset.number = told.number;
  }

  fillControls({ choices, sizes, bytes: usual, shown, number }) {
    if (!this.collective.options.length) {
      const offered = [...new Set([...sizes, ...(shown ? [shown.bytes] : [])])].sort((a, b) => a - b);
      setOptions(
        this.collective,
        Object.keys(choices).map((name) => [name, name]),
      );
      setOptions(
        this.size,
        offered.map((one) => [one, bytes(one)]),
      );
      this.size.value = String(usual);
      this.fillAlgorithms();
    }
    if (shown && number !== this.number) {
      if (this.collective.value !== shown.collective) {
        this.collective.value = shown.collective;
        this.fillAlgorithms();
      }
      this.algorithm.value = shown.algorithm;
      if ([...this.size.options].some((one) => Number(one.value) === shown.bytes))
        this.size.value = String(shown.bytes);
    }
  }

  fillAlgorithms() {
    const known = Object.entries(this.told.choices[this.collective.value]);
    this.algorithm.replaceChildren(
      ...known.map(([name, why]) =>
        element(
          "option",
          { value: name, disabled: Boolean(why), title: why },
          why ? `${name} (needs 2, 4, 8 … ranks)` : name,
        ),
      ),
    );
    this.algorithm.value = known.find(([, why]) => !why)[0];
  }

  chooseCollective() {
    this.fillAlgorithms();
    this.ask();
  }

  ask() {
    if (this.run.disabled) return;
    this.player.pause();
    this.actions.send({
      type: "collective",
      collective: this.collective.value,
      algorithm: this.algorithm.value,
      bytes: Number(this.size.value),
    });
  }

  paint() {
    const { stage, player } = this;
    if (!stage) return;
    const { at, step, moving } = player;
    const flying = at !== Math.floor(at);
    const painted = `${Math.floor(at)} ${step}`;
    if (painted !== this.painted) {
      this.painted = painted;
      this.still.innerHTML = stage.still(Math.floor(at));
      this.arrows.innerHTML = !flying && step ? stage.arrows(step) : "";
      this.blocks = flying ? stage.travelling(step) : [];
      this.moving.innerHTML = this.blocks.map(({ markup }) => `<g>${markup}</g>`).join("");
      setText(this.now, stage.shown.words[step]);
      this.svg.setAttribute(
        "aria-label",
        `${this.now.textContent} ${at === stage.shown.steps.length ? "All steps are done." : ""}`,
      );
      this.strip.innerHTML = stage.strip(step);
      if (!flying) this.actions.say(this.now.textContent);
    }
    const share = ease(at - Math.floor(at));
    this.blocks.forEach(({ from, to }, index) => {
      const lift = Math.sin(Math.PI * share) * stage.row * (Math.abs(to[0] - from[0]) > 1.5 * stage.column ? 0.6 : 0.3);
      this.moving.children[index].setAttribute(
        "transform",
        `translate(${from[0] + (to[0] - from[0]) * share} ${from[1] + (to[1] - from[1]) * share - lift})`,
      );
    });
    this.bars.innerHTML = stage.bars(at);
    setText(this.play, moving ? "❚❚ Pause" : "▶ Play");
    this.steps.max = String(player.count);
    this.steps.value = String(Math.floor(at));
    this.steps.setAttribute("aria-valuetext", `${Math.floor(at)} of ${player.count} steps done`);
    setText(this.held, `${Math.floor(at)} of ${count(player.count, "step")}`);
  }

  lines(rank, part) {
    const { stage, player } = this;
    const bits = stage.states[Math.floor(player.at)][rank][part];
    const found = holders(bits, stage.shown.ranks);
    return [
      `rank ${rank} · part ${part}`,
      ["contributions of", found.length ? `rank ${found.join(", ")}` : "none"],
      ["size", bytes(stage.shown.bytes / stage.shown.ranks)],
    ];
  }

  hover(event) {
    const cell = event.target.closest("[data-part]");
    const step = event.target.closest("[data-step]");
    this.chart.style.cursor = step ? "pointer" : "default";
    const box = this.chart.getBoundingClientRect();
    const at = [event.clientX - box.left, event.clientY - box.top, this.chart];
    if (cell) this.tip.show(this.lines(Number(cell.dataset.rank), Number(cell.dataset.part)), ...at);
    else if (step) this.tip.show(tipOf(this.stage.shown.tips[step.dataset.step - 1]), ...at);
    else this.tip.hide();
  }

  click(event) {
    const step = event.target.closest("[data-step]");
    if (step) this.player.go(Number(step.dataset.step));
  }

  key(event) {
    if (!this.stage) return;
    const { player } = this;
    onKey(event, {
      " ": () => player.toggle(),
      ArrowRight: () => player.forward(),
      ArrowLeft: () => player.back(),
      Home: () => player.go(0),
      End: () => player.go(player.count),
      "+": () => this.faster(1),
      "=": () => this.faster(1),
      "-": () => this.faster(-1),
      ArrowDown: () => this.tell(1),
      ArrowUp: () => this.tell(-1),
    });
  }

  faster(by) {
    const index = SPEEDS.indexOf(this.player.speed) + by;
    if (index < 0 || index >= SPEEDS.length) return;
    this.player.speed = SPEEDS[index];
    this.speed.value = String(SPEEDS[index]);
    this.actions.say(`speed ${SPEEDS[index]}`);
  }

  // Announces what the next rank holds.
  tell(by) {
    const { shown, states, sent } = this.stage;
    this.rank = ((((this.rank ?? -by) + by) % shown.ranks) + shown.ranks) % shown.ranks;
    const done = Math.floor(this.player.at);
    this.actions.say(
      spoken([
        `rank ${this.rank} after ${count(done, "step")}`,
        ["has sent", bytes(sent[done][this.rank])],
        ["holds", holdings(states[done][this.rank], shown.ranks)],
      ]),
    );
  }
}

function ease(share) {
  return share * share * (3 - 2 * share);
}

function holdings(parts, ranks) {
  const known = parts.map((bits, part) => [part, holders(bits, ranks)]).filter(([, found]) => found.length);
  return known.length ? known.map(([part, found]) => `part ${part} of ${found.join("+")}`).join("; ") : "nothing";
}

function sentence({ state, text, shown, choices }) {
  if (state === "running") return text;
  if (state === "failed" && shown === null) return "";
  if (shown !== null) return shown.text;
  return Object.keys(choices).length
    ? "No collective has been run yet. Choose a collective and an algorithm, then press “Run on the ranks”. It takes " +
        "a few milliseconds."
    : "No ranks: collectives need a running cluster in this notebook.";
}
