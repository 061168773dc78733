// Small helpers for the page: elements, controls, tables that are refreshed in place, the box beside the pointer.

const CONTROLS = new Set(["button", "input", "select", "summary"]);

// element("td", {class: "x", click: (event) => ...}, child, "text", ...): functions listen to the event of that name
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(name, value === true ? "" : value);
  }
  // JupyterLab's shortcuts apply to whatever has the focus (":focus"), so each control has to decline them itself.
  if (CONTROLS.has(tag) || "tabindex" in attributes) made.setAttribute("data-lm-suppress-shortcuts", "true");
  made.append(...children);
  return made;
}

// Writes text only where it changed: a table refreshed ten times a second must not disturb a reader's selection.
export function setText(node, text) {
  const held = node.firstChild;
  if (held === null || held.nextSibling || held.nodeType !== Node.TEXT_NODE) {
    if (node.textContent !== text) node.textContent = text;
  } else if (held.data !== text) held.data = text; // a new text in the same node costs half of a new node
}

// A view: its name for style sheets, what a screen reader calls it, and its title.
export function section(name, label, title, ...children) {
  return element("section", { class: `ddp-${name}`, "aria-label": label }, element("h4", {}, title), ...children);
}

// A container that scrolls if its content is too large, also by keyboard.
export function scrolled(label, node, kind = "") {
  return element(
    "div",
    { class: `ddp-table-scroll ${kind}`.trim(), tabindex: "0", role: "region", "aria-label": label },
    node,
  );
}

// A legend: [[name, style or class of the key, tooltip], ...]
export function legend(label, entries) {
  const key = (look) =>
    element("i", {
      class: look.startsWith("ddp-") ? `ddp-key ${look}` : "ddp-key",
      style: look.startsWith("ddp-") ? null : look,
      "aria-hidden": "true",
    });
  return element(
    "ul",
    { class: "ddp-legend", "aria-label": label },
    ...entries.map(([name, look, title]) => element("li", { title }, key(look), name)),
  );
}

// ---- controls ---------------------------------------------------------------------------------------------

export function button(text, title, click, attributes = {}) {
  return element("button", { type: "button", class: "ddp-button", title, click, ...attributes }, text);
}

export function field(label, ...inputs) {
  return element("label", { class: "ddp-field" }, `${label} `, ...inputs);
}

export function checkbox(text, title, change, checked = false) {
  const box = element("input", { type: "checkbox", change });
  box.checked = checked;
  return { box, node: element("label", { class: "ddp-field", title }, box, text) };
}

export function choice(label, options, change = null) {
  return element(
    "select",
    { "aria-label": label, change },
    ...options.map(([value, text]) => element("option", { value }, text)),
  );
}

// Replaces the options of a select; keeps the choice if it still exists.
export function setOptions(select, options) {
  const text = JSON.stringify(options);
  if (select.shown === text) return;
  select.shown = text;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, title]) => element("option", { value }, title)));
  if (options.some(([value]) => String(value) === chosen)) select.value = chosen;
}

export function number(label, value, attributes = {}) {
  return element("input", {
    type: "number",
    class: "ddp-number",
    "aria-label": label,
    value,
    min: "0",
    step: "any",
    ...attributes,
  });
}

// The number in an input; null if it is empty.
export function read(input) {
  return input.value.trim() === "" ? null : Number(input.value);
}

// Inputs in a row; Enter in one of them does what `enter` does.
export function form(enter, ...inputs) {
  const keydown = (event) => event.key === "Enter" && event.target.tagName === "INPUT" && enter();
  return element("div", { class: "ddp-toolbar ddp-form", keydown }, ...inputs);
}

// Runs actions for keys that are pressed without modifiers such as Ctrl: {key: action}
export function onKey(event, actions) {
  if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
  event.preventDefault();
  event.stopPropagation();
  actions[event.key]();
}

// ---- tables -----------------------------------------------------------------------------------------------

// heads: names of the columns, or [name, what it means]
export function makeTable(caption, heads) {
  const body = element("tbody");
  const cells = heads.map((name) =>
    Array.isArray(name)
      ? element("th", { scope: "col", title: name[1] }, name[0])
      : element("th", { scope: "col" }, name),
  );
  const head = element("thead", {}, element("tr", {}, ...cells));
  return { body, cells, node: element("table", {}, ...(caption ? [element("caption", {}, caption)] : []), head, body) };
}

// Makes `body` hold `count` rows, each made by `make(index)`.
export function setRows(body, count, make) {
  while (body.rows.length > count) body.deleteRow(-1);
  while (body.rows.length < count) body.append(make(body.rows.length));
}

// The first and the last row that can be seen in the table's scrolled container; the others need no texts yet.
export function rowsInView(body) {
  const { scrollTop, clientHeight } = body.parentNode.parentNode;
  const height = body.rows[0]?.offsetHeight || 1;
  return [Math.floor(scrollTop / height) - 1, Math.ceil((scrollTop + clientHeight) / height) + 1];
}

export function fill(body, rows) {
  setRows(body, rows.length, () => element("tr"));
  rows.forEach((texts, index) => {
    const row = body.rows[index];
    while (row.cells.length < texts.length)
      row.append(element(row.cells.length ? "td" : "th", row.cells.length ? {} : { scope: "row" }));
    texts.forEach((text, column) => setText(row.cells[column], text));
  });
}

// The numbers behind a picture, below it and closed; filled only while it is open.
export class Twin {
  constructor(caption, heads) {
    this.table = makeTable(caption, heads);
    const summary = element("summary", { tabindex: "0" }, "As a table");
    this.node = element(
      "details",
      { class: "ddp-twin", toggle: () => this.rows && this.draw(this.rows) },
      summary,
      scrolled(caption, this.table.node),
    );
  }

  // rows(): arrays of texts
  draw(rows) {
    this.rows = rows;
    if (this.node.open) fill(this.table.body, rows());
  }
}

// ---- tips -------------------------------------------------------------------------------------------------

// The box beside the pointer: a title, then pairs of a name and a value.
export class Tip {
  constructor() {
    this.node = element("div", { class: "ddp-tip", role: "tooltip", hidden: true });
  }

  hide() {
    this.node.hidden = true;
  }

  // lines: [title, [name, value], ...]; x, y: in pixels of `box`, which contains the tip
  show(lines, x, y, box) {
    this.node.hidden = false;
    this.node.replaceChildren(
      element("strong", {}, lines[0]),
      ...lines
        .slice(1)
        .map(([name, value]) => element("div", {}, element("span", {}, name), element("span", {}, value))),
    );
    const { offsetWidth, offsetHeight } = this.node;
    const left = x + 16 + offsetWidth > box.clientWidth ? x - offsetWidth - 12 : x + 16;
    this.node.style.left = `${Math.max(left, 0)}px`;
    this.node.style.top = `${Math.max(Math.min(y + 14, box.clientHeight - offsetHeight), 0)}px`;
  }
}

// The same lines for a screen reader.
export function spoken(lines) {
  return [lines[0], ...lines.slice(1).map((pair) => pair.join(" "))].join(", ");
}
