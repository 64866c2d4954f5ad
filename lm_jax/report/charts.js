// Draws the charts of a page: each figure holds its specification, and no colour but by its role.
// `ast` has Vega's expressions interpreted, which the policy of the page asks for.
const themes = JSON.parse(document.getElementById("chart-themes").textContent);
const dark = window.matchMedia("screen and (prefers-color-scheme: dark)");
const drawn = new Map();

async function draw(figure) {
  const scheme = dark.matches ? "dark" : "light";
  drawn.get(figure)?.finalize();
  drawn.set(figure, await window.vegaEmbed(
    figure.querySelector(".drawing"),
    JSON.parse(figure.querySelector("script").textContent),
    {
      mode: "vega-lite",
      renderer: "svg",
      ast: true,
      config: themes[scheme],
      actions: { export: true, source: false, compiled: false, editor: false },
      defaultStyle: false,
      forceActionsMenu: true,
      downloadFileName: figure.dataset.name,
      tooltip: { theme: scheme },
    },
  ));
}

// One after the other, so that the page answers in between.
let queue = Promise.resolve();
function ask(figure) {
  queue = queue.then(() => draw(figure)).catch((error) => console.error(error));
}

// A figure that is folded away has no width, and is drawn when it is opened.
const waiting = new Set(document.querySelectorAll("figure.chart"));
function drawShown() {
  for (const figure of waiting) {
    if (!figure.closest("details:not([open])")) {
      waiting.delete(figure);
      ask(figure);
    }
  }
}
drawShown();
document.addEventListener("toggle", drawShown, true);
dark.addEventListener("change", () => [...drawn.keys()].forEach(ask));
for (const hint of document.querySelectorAll(".charts-hint")) hint.hidden = false;
