"use strict";
const root = document.documentElement;
let data = { figures: {}, studies: {} };
const dark = matchMedia("(prefers-color-scheme: dark)");
const asked = new URLSearchParams(location.search).get("theme");
if (asked === "light" || asked === "dark") root.dataset.theme = asked;

// Figures name their colours as CSS custom properties; the theme's values are put in when they are drawn.
function coloured(value, style = getComputedStyle(root)) {
  if (typeof value === "string") {
    return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  }
  if (Array.isArray(value)) return value.map((item) => coloured(item, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
}

const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], showSendToCloud: false, plotlyServerURL: "" };

function draw(figure) {
  const { plot } = data.figures[figure.dataset.figure];
  const canvas = figure.querySelector(".canvas");
  const layout = coloured(plot.layout);
  if (figure.quality !== undefined && layout.shapes) Object.assign(layout.shapes[0], { y0: figure.quality, y1: figure.quality });
  return Plotly.react(canvas, coloured(plot.data), layout, config);
}

function save(figure, format) {
  const name = figure.dataset.figure;
  if (format !== "csv") {
    const canvas = figure.querySelector(".canvas");
    const size = { width: canvas.clientWidth, height: canvas.clientHeight };
    Plotly.downloadImage(canvas, { format, filename: name, scale: format === "png" ? 2 : 1, ...size });
    return;
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data.figures[name].csv], { type: "text/csv" }));
  link.download = `${name}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Lets a figure's level line be held anywhere, and follows the pointer. Plotly's own can be had on its dashes alone,
// and covers points there.
function held(figure, now, move) {
  const canvas = figure.querySelector(".canvas");
  const top = (event) => event.clientY - canvas.getBoundingClientRect().top - canvas._fullLayout.yaxis._offset;
  const isNear = (event) => Math.abs(top(event) - canvas._fullLayout.yaxis.d2p(now())) < 9;
  canvas.addEventListener("pointerdown", (event) => {
    // What lies under the pointer goes first: a point that is clicked leads to its run.
    if (event.button !== 0 || event.target.closest(".modebar") || canvas._hoverdata?.length || !isNear(event)) return;
    event.preventDefault(); // so that Plotly takes it for no zoom
    canvas.setPointerCapture(event.pointerId);
  }, true);
  canvas.addEventListener("pointermove", (event) => {
    const isHeld = canvas.hasPointerCapture(event.pointerId);
    canvas.classList.toggle("near-line", isHeld || isNear(event));
    if (isHeld) move(canvas._fullLayout.yaxis.p2d(top(event)));
  });
}

// A study's live part: which axis, where the quality line lies, and the table that follows from both.
function live(part) {
  const axes = data.studies[part.dataset.study];
  const [tradeoff, learning] = part.querySelectorAll("figure");
  const slider = part.querySelector("input[type=range]");
  let axis = part.querySelector("input[type=radio]:checked").value;
  if (!slider) return;

  function show(index) {
    const level = axes[axis].levels[index];
    slider.value = index;
    slider.setAttribute("aria-valuetext", level.text);
    part.querySelector("output").textContent = level.text;
    part.querySelectorAll(".speed tbody tr").forEach((row, r) => {
      [...row.cells].forEach((cell, c) => { cell.textContent = level.rows[r][c]; });
    });
    tradeoff.quality = level.quality;
    return Plotly.relayout(tradeoff.querySelector(".canvas"), { "shapes[0].y0": level.quality, "shapes[0].y1": level.quality, "shapes[0].x0": 0, "shapes[0].x1": 1 });
  }

  function nearest(quality) {
    const gaps = axes[axis].levels.map((level) => Math.abs(level.quality - quality));
    return gaps.indexOf(Math.min(...gaps));
  }

  slider.addEventListener("input", () => show(Number(slider.value)));
  held(tradeoff, () => tradeoff.quality ?? axes[axis].levels[slider.value].quality, (quality) => {
    const index = nearest(quality);
    if (index !== Number(slider.value)) show(index);
  });
  tradeoff.querySelector(".canvas").on("plotly_relayout", (change) => {
    const quality = change["shapes[0].y0"];
    if (quality !== undefined && quality !== tradeoff.quality) show(nearest(quality));
  });
  part.addEventListener("change", (event) => {
    if (event.target.type !== "radio") return;
    axis = event.target.value;
    slider.max = axes[axis].levels.length - 1;
    tradeoff.dataset.figure = `${part.dataset.study}-tradeoff-${axis}`;
    learning.dataset.figure = `${part.dataset.study}-learning-${axis}`;
    tradeoff.quality = undefined;
    Promise.all([draw(tradeoff), draw(learning)]).then(() => show(axes[axis].start));
  });
}

let figures = [];

// Draws what the page holds now, from the data that came with it.
function start() {
  data = { figures: {}, studies: {} };
  for (const part of document.querySelectorAll("script.data")) {
    const found = JSON.parse(part.textContent);
    Object.assign(data.figures, found.figures);
    Object.assign(data.studies, found.studies);
  }
  figures = [...document.querySelectorAll("figure[data-figure]")];
  Promise.all(figures.map(draw)).then(() => {
    document.querySelectorAll(".live").forEach(live);
    document.dispatchEvent(new CustomEvent("cosmati:drawn"));
  });
}

start();
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-save]");
  if (button) save(button.closest("figure"), button.dataset.save);
});
document.getElementById("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  root.dataset.theme = isDark ? "light" : "dark";
  document.dispatchEvent(new CustomEvent("cosmati:theme"));
  figures.forEach(draw);
});
dark.addEventListener("change", () => figures.forEach(draw));
