// Draws the outputs again that wait for a widget no longer, though it has come.
//
// In a page that is opened again, an output looks for its widget ten times a second for two seconds and then gives up
// (`get_model` of ipywidgets 8.1): it does not look once more. If the kernel's widgets came after its last look, and
// all had come before it gave up, it says that the model was not found, for good. That is likely where restoring them
// takes two seconds, as on a busy machine.

const EVERY_MS = 500;
const CHECKS = 60;
const VIEW = "application/vnd.jupyter.widget-view+json";
const GIVEN_UP = "Error displaying widget: model not found";
const watched = new WeakSet(); // managers of widgets, one for each notebook in the page

export function watchLostOutputs(manager) {
  const cells = manager?.context?.model?.cells; // JupyterLab's and Notebook's
  if (!cells || watched.has(manager)) return;
  watched.add(manager);
  let left = CHECKS;
  const timer = setInterval(() => {
    left -= 1;
    if (left === 0 || manager.isDisposed) clearInterval(timer);
    else drawLostOutputs(manager, cells);
  }, EVERY_MS);
}

function drawLostOutputs(manager, cells) {
  for (const node of document.querySelectorAll(".jp-Notebook .jp-OutputArea-output.jupyter-widgets")) {
    if (node.textContent !== GIVEN_UP) continue;
    /** @type {HTMLElement} */
    const cell = node.closest(".jp-Cell");
    const output = node.closest(".jp-OutputArea-child");
    const number =
      cell.dataset.windowedListIndex ?? [...cell.closest(".jp-Notebook").querySelectorAll(".jp-Cell")].indexOf(cell);
    const index = [...output.parentElement.children]
      .filter((one) => one.matches(".jp-OutputArea-child"))
      .indexOf(output);
    const outputs = cells.get(Number(number))?.outputs;
    const found = index < (outputs?.length ?? 0) ? outputs.get(index) : null;
    const name = found?.data[VIEW]?.model_id ?? "";
    if (!manager.has_model(name)) continue;
    manager.get_model(name).then((model) => {
      // With a view it is shown: the node is at the same place of another notebook.
      if (Object.keys(model.views).length === 0) outputs.set(index, found.toJSON());
    });
  }
}
