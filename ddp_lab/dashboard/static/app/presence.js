// Whether a node is in view, its size, and the theme of the page.

import { readTheme } from "../charts/theme.js";

export class Presence {
  // actions: {seen(): it came into view or left it; show(): draw again; theme(): the colours changed; second(): each
  // second in view}
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.inView = false;
  }

  begin() {
    const { seen, show, theme } = this.actions;
    this.inView = true;
    const intersection = new IntersectionObserver((entries) => {
      this.inView = entries.at(-1).isIntersecting; // a busy browser reports several changes at once
      seen();
      if (this.inView) show();
    });
    intersection.observe(this.root);
    const size = new ResizeObserver(() => show());
    size.observe(this.root);
    // JupyterLab changes its theme with an attribute of the body.
    const switched = new MutationObserver(() => {
      this.seenTheme = null; // the colours may change after the attribute: check again at the next second
      theme();
    });
    switched.observe(document.body, {
      attributes: true,
      attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"],
    });
    this.observers = [intersection, size, switched];
    this.seenTheme = this.themeNow();
    this.tick = setInterval(() => this.everySecond(), 1000);
  }

  end() {
    this.inView = false;
    for (const observer of this.observers) observer.disconnect();
    clearInterval(this.tick);
  }

  // Checks for a theme that no attribute announces, and for changes without a message; the pictures stay as they are.
  everySecond() {
    if (!this.inView) return;
    const theme = this.themeNow();
    if (theme !== this.seenTheme) this.actions.theme();
    this.seenTheme = theme;
    this.actions.second();
  }

  themeNow() {
    return JSON.stringify(readTheme(this.root));
  }
}
