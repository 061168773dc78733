// What the painters of canvases have in common: colours, texts, the lines of tooltips.

import { COLOURS } from "../generated.js";

export const colourOf = (role, theme) => theme[role] ?? COLOURS[role] ?? role;

export function write(pen, theme, text, x, y, align = "left", role = "muted", font = "11px") {
  pen.font = `${font} ${theme.font}`;
  pen.textAlign = align;
  pen.fillStyle = colourOf(role, theme);
  pen.fillText(text, x, y);
}

// The end of a text that is too long.
export function fitEnd(pen, text, room) {
  let shown = text;
  while (shown.length > 4 && pen.measureText(shown).width > room) shown = `…${shown.slice(2)}`;
  return shown;
}

// Lines of a tooltip: the first is a title, of the others a tab divides name and value.
export function tipOf(text) {
  const [title, ...lines] = text.split("\n");
  return [title, ...pairsOf(lines)];
}

export function pairsOf(lines) {
  return lines.filter(Boolean).map((line) => (line.includes("\t") ? line.split("\t") : ["", line]));
}
