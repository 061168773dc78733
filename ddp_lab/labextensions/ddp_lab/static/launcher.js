// A prebuilt extension of JupyterLab: cards in its launcher that open the quickstart and the lessons.
//
// JupyterLab loads a prebuilt extension as a module federation container: an object with `init`, which is handed what
// is shared (the launcher's token, icons), and `get`, which returns the plugin. Written by hand, it needs no bundler.

(() => {
  const FIRST = "01_ranks_and_cells.ipynb"; // what tells our tutorials from any other folder of that name
  const CATEGORY = "ddp_lab";
  const LESSON = /^(\d+|[A-Z])_(.*)\.ipynb$/; // "A_" is an appendix
  let shared = {};

  async function sharedModule(name) {
    const versions = Object.values(shared[name]);
    return (await versions[0].get())();
  }

  function words(stem) {
    const text = stem.replaceAll("_", " ");
    return text[0].toUpperCase() + text.slice(1);
  }

  /** The names of the files in a folder of the server, empty where there is no such folder. */
  async function namesIn(contents, folder) {
    const [parent, name] = folder.includes("/") ? folder.split("/") : ["", folder];
    const above = await contents.get(parent, { content: true });
    if (!above.content.some((one) => one.type === "directory" && one.name === name)) return [];
    return (await contents.get(folder, { content: true })).content.map((one) => one.name).sort();
  }

  function icon(LabIcon, name, text) {
    const svgstr =
      '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="24">' +
      '<rect x="1" y="1" width="22" height="22" rx="4" fill="#0072B2"/>' +
      `<text x="12" y="17" text-anchor="middle" font-size="13" font-family="sans-serif" fill="#fff">${text}</text></svg>`;
    return new LabIcon({ name: `ddp_lab:${name}`, svgstr });
  }

  async function addCards(app, launcher, LabIcon) {
    const { contents } = app.serviceManager;
    const lessons = await namesIn(contents, "tutorials");
    if (!lessons.includes(FIRST)) return;
    const cards = lessons
      .map((name) => [name, LESSON.exec(name)])
      .filter(([, found]) => found)
      .map(([name, [, number, stem]]) => [`tutorials/${name}`, number.replace(/^0/, ""), words(stem)]);
    if ((await namesIn(contents, "notebooks")).includes("quickstart.ipynb")) {
      cards.unshift(["notebooks/quickstart.ipynb", "▶", "Quickstart"]);
    }
    cards.forEach(([path, sign, label], rank) => {
      const command = `ddp_lab:open-${path}`;
      app.commands.addCommand(command, {
        label,
        caption: sign === "▶" ? "The whole path once" : `${/\d/.test(sign) ? "Lesson" : "Appendix"} ${sign}: ${label}`,
        icon: icon(LabIcon, path, sign),
        execute: () => app.commands.execute("docmanager:open", { path }),
      });
      launcher.add({ command, category: CATEGORY, rank });
    });
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.ddp_lab = {
    init: (scope) => {
      shared = scope;
    },
    get: async () => {
      const { ILauncher } = await sharedModule("@jupyterlab/launcher");
      const { LabIcon } = await sharedModule("@jupyterlab/ui-components");
      const plugin = {
        id: "ddp_lab:launcher",
        description: "Opens the lessons of ddp_lab from the launcher.",
        autoStart: true,
        optional: [ILauncher],
        activate: (app, launcher) => {
          if (!launcher) return;
          app.restored.then(() => addCards(app, launcher, LabIcon)).catch((error) => console.error("ddp_lab:", error));
        },
      };
      return () => ({ __esModule: true, default: plugin });
    },
  };
})();
