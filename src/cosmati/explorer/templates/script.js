"use strict";
const root = document.documentElement;
let data = { figures: {}, studies: {} };
const dark = matchMedia("(prefers-color-scheme: dark)");
const asked = new URLSearchParams(location.search).get("theme");
if (asked === "light" || asked === "dark") root.dataset.theme = asked;

// Figures name their colours as CSS custom properties; the theme's values are put in when they are drawn.
function coloured(value, style = getComputedStyle(root)) {
  if (typeof value === "string") {
    if (value.startsWith("var(--")) return style.getPropertyValue(value.slice(4, -1)).trim();
    // The mark before a name: text of others begins otherwise, since its brackets are escaped.
    return value.replace(/^<span style="color:var\((--series-\d)\)">/, (_, name) => `<span style="color:${style.getPropertyValue(name).trim()}">`);
  }
  if (Array.isArray(value)) return value.map((item) => coloured(item, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
}

const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], showSendToCloud: false, plotlyServerURL: "" };

// Takes figures and studies in: what came with the page, or was fetched.
function take(found) {
  Object.assign(data.figures, found.figures);
  for (const [name, axes] of Object.entries(found.studies || {})) data.studies[name] = { ...data.studies[name], ...axes };
}

// A page that is served has `askServer`; a bundle asks nobody, and no figure of it has an address.
async function fetched(address) {
  take(await askServer(address));
}

async function draw(figure) {
  const canvas = figure.querySelector(".canvas");
  const name = figure.dataset.figure;
  try {
    if (!data.figures[name]) await fetched(figure.dataset.address);
  } catch {
    canvas.textContent = "This figure can't be fetched. Is `cosmati explore` still running?";
    return undefined;
  }
  if (figure.dataset.figure !== name) return draw(figure); // another axis was chosen meanwhile
  const { plot } = data.figures[name];
  const layout = coloured(plot.layout);
  canvas.setAttribute("aria-label", canvas.parentElement.getAttribute("aria-label")); // it may have drawn other points before
  if (figure.quality !== undefined && layout.shapes) Object.assign(layout.shapes[0], { y0: figure.quality, y1: figure.quality });
  // Without `edits` a line has to be clicked before it can be dragged.
  const edits = { shapePosition: Boolean(layout.shapes?.some((shape) => shape.editable)) };
  await Plotly.react(canvas, coloured(plot.data), layout, { ...config, edits });
  if (!figure.isDrawn) {
    figure.isDrawn = true;
    figure.dispatchEvent(new CustomEvent("cosmati:figure", { bubbles: true }));
  }
  return canvas;
}

// Figures that came with the page are drawn at once, those with an address when they come near the window.
const near = new IntersectionObserver((seen) => {
  for (const one of seen.filter((found) => found.isIntersecting)) {
    near.unobserve(one.target);
    draw(one.target);
  }
}, { rootMargin: "300px" });

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

// Another axis has other figures, and their numbers stand elsewhere.
function rename(figure, name) {
  figure.dataset.figure = name;
  const link = figure.querySelector("a[data-save=csv]");
  if (!link) return;
  const address = new URL(link.href);
  address.searchParams.set("name", name);
  Object.assign(link, { href: address, download: `${name}.csv` });
}

// A study's live part: which axis, where the quality line lies, and the table that follows from both.
function live(part) {
  if (part.isLive) return;
  part.isLive = true;
  const axes = () => data.studies[part.dataset.study];
  const [tradeoff, learning] = part.querySelectorAll("figure");
  const slider = part.querySelector("input[type=range]");
  let axis = part.querySelector("input[type=radio]:checked").value;
  if (!slider) return;
  const usual = axis;
  let numMoving = 0; // of our own moves of the line, which Plotly reports as it does a reader's

  // A served page's state is in its address, and there again after a reload; a bundle's file has none of its own.
  let later;
  function told() {
    clearTimeout(later); // browsers count changes of an address, and refuse many
    if (part.dataset.address) later = setTimeout(tell, 150);
  }

  function tell() {
    if (!part.isConnected) return;
    const address = new URL(location.href);
    const { levels, start } = axes()[axis];
    const state = { by: axis === usual ? "" : axis, line: Number(slider.value) === start ? "" : Number(levels[slider.value].quality.toPrecision(6)) };
    for (const [name, value] of Object.entries(state)) {
      if (value === "") address.searchParams.delete(name);
      else address.searchParams.set(name, value);
    }
    if (address.href !== location.href) history.replaceState(history.state, "", address);
  }

  function show(index) {
    const level = axes()[axis].levels[index];
    slider.value = index;
    slider.setAttribute("aria-valuetext", level.text);
    part.querySelector("output").textContent = level.text;
    part.querySelectorAll(".speed tbody tr").forEach((row, r) => {
      [...row.cells].forEach((cell, c) => { cell.textContent = level.rows[r][c]; });
    });
    tradeoff.quality = level.quality;
    numMoving += 1;
    const line = { "shapes[0].y0": level.quality, "shapes[0].y1": level.quality, "shapes[0].x0": 0, "shapes[0].x1": 1 };
    return Plotly.relayout(tradeoff.querySelector(".canvas"), line).finally(() => { numMoving -= 1; });
  }

  function nearest(quality) {
    const gaps = axes()[axis].levels.map((level) => Math.abs(level.quality - quality));
    return gaps.indexOf(Math.min(...gaps));
  }

  function moved(index) {
    show(index);
    told();
  }

  slider.addEventListener("input", () => moved(Number(slider.value)));
  held(tradeoff, () => tradeoff.quality ?? axes()[axis].levels[slider.value].quality, (quality) => {
    const index = nearest(quality);
    if (index !== Number(slider.value)) moved(index);
  });
  tradeoff.querySelector(".canvas").on("plotly_relayout", (change) => {
    const quality = change["shapes[0].y0"];
    if (!numMoving && quality !== undefined && quality !== tradeoff.quality) moved(nearest(quality));
  });

  async function turn(chosen) {
    if (!axes()[chosen]) await fetched(`${part.dataset.address}?axis=${encodeURIComponent(chosen)}`);
    if (!part.querySelector(`input[value="${chosen}"]`).checked) return; // a later choice came first
    axis = chosen;
    slider.max = axes()[axis].levels.length - 1;
    rename(tradeoff, `${part.dataset.study}-tradeoff-${axis}`);
    rename(learning, `${part.dataset.study}-learning-${axis}`);
    tradeoff.quality = undefined;
    await Promise.all([draw(tradeoff), draw(learning)]);
    await show(axes()[axis].start);
  }

  part.addEventListener("change", async (event) => {
    if (event.target.type !== "radio") return;
    await turn(event.target.value);
    told();
  });
  restore();

  // What the address says of axis and line, as `told` wrote it.
  async function restore() {
    if (!part.dataset.address) return;
    const { searchParams } = new URL(location.href);
    const radio = [...part.querySelectorAll("input[type=radio]")].find((one) => one.value === searchParams.get("by"));
    if (radio && !radio.checked) {
      radio.checked = true;
      await turn(radio.value);
    }
    const line = parseFloat(searchParams.get("line"));
    if (Number.isFinite(line)) show(nearest(line));
  }
}

let figures = [];

// Draws what the page holds now, from the data that came with it.
function start() {
  // A page that was put in place of another brings all its data.
  if (!document.querySelector("script.data[data-taken]")) data = { figures: {}, studies: {} };
  for (const part of document.querySelectorAll("script.data:not([data-taken])")) {
    part.dataset.taken = "yes";
    take(JSON.parse(part.textContent));
  }
  figures = [...document.querySelectorAll("figure[data-figure]")];
  const fresh = figures.filter((figure) => !figure.isBegun);
  fresh.forEach((figure) => { figure.isBegun = true; });
  fresh.filter((figure) => !data.figures[figure.dataset.figure]).forEach((figure) => near.observe(figure));
  Promise.all(fresh.filter((figure) => data.figures[figure.dataset.figure]).map(draw)).then(() => {
    document.querySelectorAll(".live").forEach(live);
    document.dispatchEvent(new CustomEvent("cosmati:drawn"));
  });
}

function redraw() {
  figures.filter((figure) => figure.isDrawn).forEach(draw);
}

start();
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-save]");
  if (button && !button.href) save(button.closest("figure"), button.dataset.save);
});
document.getElementById("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  root.dataset.theme = isDark ? "light" : "dark";
  document.dispatchEvent(new CustomEvent("cosmati:theme"));
  redraw();
});
dark.addEventListener("change", redraw);
// Paper has no scrolling: what wasn't looked at yet is fetched too.
addEventListener("beforeprint", () => figures.filter((figure) => !figure.isDrawn).forEach(draw));
