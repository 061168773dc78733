"use strict";
/* Ranks the results of the site's search: a page that solves a problem before one that mentions the word. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  /* What is added for a page's folder; the first that fits counts. */
  places: [
    [/^tutorials\/site\/(how_to|get_started)\//, 4],
    [/^tutorials\/site\/(troubleshooting|faq)$/, 3],
    [/^tutorials\/site\/guide\//, 3],
    [/^tutorials\/site\/explanation\//, 2],
    [/^tutorials\/\w+$/, 1],
    [/^tutorials\/site\/(teach\/|index$)/, -1],
    [/^[A-Z]+$/, -4],
  ],

  /* A name of the API counts where one of its words begins with what was asked: not describe_if_changed for "hang". */
  names(full) {
    const asked = (new URLSearchParams(window.location.search).get("q") ?? "").toLowerCase().split(/\s+/);
    const name = full.toLowerCase();
    return asked.some((word) => name === word || name.split(/[._]+/).some((part) => part.startsWith(word))
      || (word.includes("_") && name.includes(word)));
  },

  score([page, title, anchor, about, score, file, kind]) {
    if (kind === "object" && !Scorer.names(title)) return -10;
    const place = Scorer.places.find(([pattern]) => pattern.test(page));
    return score + (place ? place[1] : 0);
  },
};
