"use strict";
// htmx puts new parts into the page: their figures are drawn as they come.
document.addEventListener("htmx:afterSettle", () => { start(); chosenShown(); });
document.addEventListener("cosmati:theme", () => localStorage.setItem("theme", document.documentElement.dataset.theme));

// Addresses stay short: what is empty is left out, but for a task, where empty means all.
document.addEventListener("htmx:configRequest", (event) => {
  const { parameters } = event.detail;
  for (const name of [...parameters.keys?.() ?? Object.keys(parameters)]) {
    if (parameters[name] === "" && (name !== "task" || event.detail.path !== "/")) delete parameters[name];
  }
});

// A part that follows the page by itself may not come.
for (const name of ["htmx:responseError", "htmx:sendError"]) {
  document.addEventListener(name, (event) => {
    const { elt } = event.detail;
    if (!elt.matches?.(".follows")) return;
    const words = document.createElement("p");
    words.setAttribute("role", "status");
    words.textContent = "This part can't be fetched: what it shows was moved or removed, or `cosmati explore` doesn't run any more. Load the page again.";
    elt.replaceWith(words); // so it's asked for no more
  });
}

// What was unfolded stays so when the page is put anew.
let unfolded = [];
document.addEventListener("htmx:beforeSwap", (event) => {
  unfolded = [...document.querySelectorAll("details[open][id], input.toggle:checked")].map((one) => one.id);
  // htmx says farewell to each element that goes, by two events. These know nothing of it, and are thousands.
  const { shouldSwap, target } = event.detail;
  if (shouldSwap) target.querySelectorAll("select, table, .canvas:not([hx-preserve])").forEach((one) => one.replaceChildren());
});
document.addEventListener("htmx:afterSwap", () => {
  for (const id of unfolded) {
    const found = document.getElementById(id);
    if (found) found[found.tagName === "DETAILS" ? "open" : "checked"] = true;
  }
});
// A panel folds when one clicks beside it, or presses Escape.
document.addEventListener("click", (event) => fold((one) => !one.contains(event.target)));
function fold(which) {
  document.querySelectorAll("details.more[open]").forEach((one) => { if (which(one)) one.open = false; });
}

// The cloud: a point leads to its run, and its quality line and the slider follow each other. Its canvas outlives
// the page round it, so it looks for the slider that is there now.
const lineSlider = () => document.querySelector(".line input[type=range]");
function lineMoved(quality) {
  const slider = lineSlider();
  if (!slider) return;
  slider.value = quality;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}
function cloud(figure) {
  if (figure.dataset.figure !== "cloud") return;
  const canvas = figure.querySelector(".canvas");
  followed(figure, canvas);
  if (canvas.isCloud) return;
  canvas.isCloud = true;
  canvas.on("plotly_click", (clicked) => {
    const address = clicked.points[0]?.customdata;
    if (typeof address === "string" && address.startsWith("/runs/")) location.assign(address);
  });
  canvas.on("plotly_relayout", (change) => {
    const quality = change["shapes[0].y0"];
    if (quality !== undefined && quality !== canvas.closest("figure").quality) lineMoved(quality);
  });
  held(figure, () => Number(lineSlider()?.value ?? NaN), lineMoved);
}
function followed(figure, canvas) {
  const slider = lineSlider();
  slider?.addEventListener("input", () => {
    const quality = Number(slider.value);
    const text = Number(quality.toPrecision(4)).toString();
    slider.closest("label").querySelector("output").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    figure.quality = quality;
    Plotly.relayout(canvas, { "shapes[0].y0": quality, "shapes[0].y1": quality, "shapes[0].x0": 0, "shapes[0].x1": 1 });
  });
}
document.addEventListener("cosmati:figure", (event) => cloud(event.target));
// It may have been drawn before this script came.
[...document.querySelectorAll("figure[data-figure]")].filter((figure) => figure.isDrawn).forEach(cloud);

// Runs that are chosen to compare: two, from whichever pages.
const chosen = () => JSON.parse(sessionStorage.getItem("chosen") || "[]");
function chosenShown() {
  const keys = chosen();
  document.querySelectorAll("input[name=key]").forEach((box) => { box.checked = keys.includes(box.value); });
  const button = document.getElementById("compare-button");
  if (!button) return;
  button.disabled = keys.length !== 2;
  button.title = keys.length === 2 ? "" : "Choose two runs";
  const count = button.querySelector(".count");
  count.hidden = !keys.length;
  count.textContent = keys.length;
}
document.addEventListener("change", (event) => {
  const box = event.target;
  if (box.name !== "key") return;
  const others = chosen().filter((key) => key !== box.value);
  // A third one takes the place of the first.
  sessionStorage.setItem("chosen", JSON.stringify(box.checked ? [...others, box.value].slice(-2) : others));
  chosenShown();
});
document.addEventListener("submit", (event) => {
  if (event.target.id !== "compare") return;
  event.preventDefault();
  const [a, b] = chosen();
  if (b) location.assign(`/compare?${new URLSearchParams({ a, b })}`);
});
addEventListener("pageshow", chosenShown);

// Keys.
const keys = document.getElementById("keys");
document.getElementById("show-keys").addEventListener("click", () => keys.showModal());
function step(by) {
  const links = [...document.querySelectorAll("#runs tbody th a")];
  const at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
  const link = links[at < 0 ? 0 : Math.min(links.length - 1, Math.max(0, at + by))];
  link?.focus();
  return Boolean(link);
}
const actions = {
  "/": () => { document.getElementById("show-filters")?.setAttribute("checked", ""); document.getElementById("text")?.focus(); return Boolean(document.getElementById("text")); },
  "?": () => { keys.showModal(); return true; },
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  j: () => step(1),
  k: () => step(-1),
  x: () => { document.activeElement.closest("#runs tr")?.querySelector("input[name=key]")?.click(); return true; },
  c: () => { document.getElementById("compare-button")?.click(); return true; },
  t: () => { location.assign("/"); return true; },
  r: () => { location.assign("/runs"); return true; },
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    fold(() => true);
    if (event.target.id === "text") event.target.blur();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]")) return;
  const action = Object.hasOwn(actions, event.key) ? actions[event.key] : undefined;
  // Arrows belong to the page where it has no table of runs.
  if (action?.()) event.preventDefault();
});
