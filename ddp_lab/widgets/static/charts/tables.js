// Tables that are refreshed in place, and the table twin of a picture.

import { element, setRows, setText } from "./theme.js";

export function makeTable(caption, heads) {
  const body = element("tbody");
  const cells = heads.map((name) => (Array.isArray(name) ? element("th", { scope: "col", title: name[1] }, name[0]) : element("th", { scope: "col" }, name)));
  const head = element("thead", {}, element("tr", {}, ...cells));
  return { body, node: element("table", {}, element("caption", {}, caption), head, body) };
}

export function fill(body, rows) {
  setRows(body, rows.length, () => element("tr"));
  rows.forEach((texts, index) => {
    const row = body.rows[index];
    while (row.cells.length < texts.length) row.append(element(row.cells.length ? "td" : "th", row.cells.length ? {} : { scope: "row" }));
    texts.forEach((text, column) => setText(row.cells[column], text));
  });
}

// The numbers behind a picture, below it and closed; filled only while it is open.
export class Twin {
  constructor(caption, heads) {
    this.table = makeTable(caption, heads);
    const scroll = element("div", { class: "ddp-table-scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table.node);
    this.node = element("details", { class: "ddp-twin" }, element("summary", { tabindex: "0" }, "As a table"), scroll);
    this.node.addEventListener("toggle", () => this.rows && this.draw(this.rows));
  }

  // rows(): arrays of texts
  draw(rows) {
    this.rows = rows;
    if (this.node.open) fill(this.table.body, rows());
  }
}
