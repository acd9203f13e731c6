"use strict";
// On paper: the light theme, figures as wide as the sheet, and tables that were folded away. After it all is as before.
(() => {
  const PAPER_WIDTH = 690; // CSS pixels between the margins of A4
  let before = null;
  const parts = () => [...document.querySelectorAll("details")].filter((part) => !part.closest("#reproduction, [aria-labelledby=reproduction]"));
  const redraw = (width) => {
    for (const figure of document.querySelectorAll("figure[data-figure]")) {
      const canvas = figure.querySelector(".canvas");
      const column = figure.closest(".multiples") ? width / 2 - 10 : width;
      const least = parseFloat(canvas.style.minWidth) || 0; // a grid of text that can't be narrower is made smaller
      canvas.style.zoom = width && least > column ? column / least : "";
      draw(figure);
      Plotly.relayout(canvas, width ? { autosize: false, width: Math.max(column, least) } : { autosize: true, width: null });
    }
  };
  addEventListener("beforeprint", () => {
    if (before) return;
    before = { theme: root.dataset.theme, closed: parts().filter((part) => !part.open) };
    root.dataset.theme = "light";
    before.closed.forEach((part) => { part.open = true; });
    redraw(PAPER_WIDTH);
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    before.closed.forEach((part) => { part.open = false; });
    before = null;
    redraw(0);
  });
})();
