"use strict";
// The live view: asks for the points that came since the last look, and draws them.
(() => {
  const job = document.querySelector(".job[data-lines]");
  if (!job || typeof uPlot === "undefined") return;
  const MOST = 4000, HEIGHT = 200, NAMES = { learning_rate: "learning rate", gradient_norm: "gradient norm" };
  const part = (name) => job.querySelector(`[data-job="${name}"]`);
  const charts = new Map();
  const sync = uPlot.sync("steps");
  const interval = 1000 * Number(job.dataset.interval);
  const controls = part("controls");
  let after = "", failures = 0, timer = 0, going = true, asking = false;
  let old = null, heard = 0;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(5))));

  // Exponential moving average without a bias at its start.
  function smoothed(values, share) {
    if (!share) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = share * sum + (1 - share) * value;
      weight = share * weight + 1 - share;
      return sum / weight;
    });
  }

  // First, last, and each window's lowest and highest, as the server thins.
  function thinned(chart) {
    const { steps, values } = chart;
    if (steps.length <= MOST) return;
    const windows = MOST / 4, inner = steps.length - 2, kept = new Set([0, steps.length - 1]);
    for (let w = 0; w < windows; w++) {
      const start = 1 + Math.floor((w * inner) / windows), end = 1 + Math.floor(((w + 1) * inner) / windows);
      let low = start, high = start;
      for (let place = start; place < end; place++) {
        if (values[place] < values[low]) low = place;
        if (values[place] > values[high]) high = place;
      }
      if (start < end) kept.add(low).add(high);
    }
    const chosen = [...kept].sort((a, b) => a - b);
    chart.steps = chosen.map((place) => steps[place]);
    chart.values = chosen.map((place) => values[place]);
  }

  function options(chart, width) {
    const axis = () => ({ stroke: colour("--muted"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { stroke: colour("--rule"), width: 1 }, font: "12px system-ui, sans-serif" });
    const isLog = chart.name === "loss" && controls.elements.log.checked && chart.values.every((value) => value > 0);
    return {
      width, height: HEIGHT,
      cursor: { sync: { key: sync.key, setSeries: false }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [{ ...axis(), size: 34 }, { ...axis(), size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
      series: [
        { label: "step", value: (_, step) => (step === null ? "–" : step.toLocaleString("en")) },
        { label: chart.name, stroke: colour("--accent"), width: 1.6, points: { show: chart.steps.length < 40, size: 5 }, value: (_, value) => short(value) },
      ],
    };
  }

  function drawn(chart) {
    const canvas = chart.figure.querySelector(".canvas");
    const share = Number(controls.elements.smoothing.value);
    const data = [chart.steps, smoothed(chart.values, share)];
    const isFew = chart.steps.length < 40;
    if (chart.plot && chart.few === isFew) {
      chart.plot.setData(data);
    } else {
      if (chart.plot) chart.plot.destroy();
      chart.few = isFew;
      chart.plot = new uPlot(options(chart, canvas.clientWidth), data, canvas);
    }
    const last = chart.values.length - 1;
    canvas.setAttribute("aria-label", `${chart.name} over the steps: ${short(chart.values[last])} at step ${chart.steps[last]}`);
  }

  function anew() {
    for (const chart of charts.values()) {
      if (chart.plot) chart.plot.destroy();
      chart.plot = undefined;
      if (chart.steps.length) drawn(chart);
    }
  }

  function made(file, key) {
    const name = NAMES[key] || key;
    const figure = document.createElement("figure");
    figure.className = "plot chart";
    const title = document.createElement("h3");
    title.textContent = name;
    const canvas = document.createElement("div");
    canvas.className = "canvas";
    canvas.setAttribute("role", "img");
    const exports = document.createElement("div");
    exports.className = "exports";
    exports.setAttribute("role", "group");
    exports.setAttribute("aria-label", `Save the figure ${name}`);
    const chart = { file, name, figure, steps: [], values: [] };
    figure.dataset.measure = `${file}/${key}`;
    for (const format of ["png", "svg", "csv"]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = format.toUpperCase();
      button.addEventListener("click", () => save(chart, format));
      exports.append(button);
    }
    figure.append(title, canvas, exports);
    part("charts").append(figure);
    return chart;
  }

  function taken(file, told) {
    const ours = [...charts.values()].filter((chart) => chart.file === file);
    const changed = new Set();
    for (const chart of ours) {
      // A run that was resumed takes its steps anew from here on.
      let keep = chart.steps.length;
      if (told.anew) keep = 0;
      else if (told.since !== null) while (keep && chart.steps[keep - 1] >= told.since) keep--;
      if (keep < chart.steps.length) {
        chart.steps.length = chart.values.length = keep;
        changed.add(chart);
      }
    }
    for (const [name, [steps, values]] of Object.entries(told.measures)) {
      const key = `${file}/${name}`;
      if (!charts.has(key)) charts.set(key, made(file, name));
      const chart = charts.get(key);
      chart.steps.push(...steps);
      chart.values.push(...values);
      thinned(chart);
      changed.add(chart);
    }
    changed.forEach(drawn);
  }

  function shown(told) {
    for (const name of ["title", "sentence", "progress", "left", "loss", "rate", "age"]) part(name).textContent = told[name];
    part("title").parentElement.className = `status ${told.tone}`;
    const bar = part("share");
    if (told.share !== null) bar.value = told.share;
    else if (told.going) bar.removeAttribute("value");
    else bar.value = 0;
    document.title = `${told.going && told.share !== null ? `${Math.floor(100 * told.share)} % ` : ""}${told.title} · Cosmati`;
    job.dataset.status = told.status;
    taken("steps", told.steps);
    taken("evaluations", told.evaluations);
    old = told.seconds_old;
    heard = performance.now();
    after = told.after;
    going = told.going;
    controls.hidden = charts.size === 0;
    const isOver = told.status === "completed" || told.status === "exhausted";
    part("note").textContent = isOver ? "The run has ended; this page asks no more." : going ? "" : "This page looks again now and then: a run that goes on is followed.";
    return isOver;
  }

  // What it has shown stays: there's no other copy of it.
  function removed(told) {
    going = false;
    job.dataset.status = told.status;
    part("title").textContent = "Gone";
    part("title").parentElement.className = "status unmet";
    part("sentence").textContent = `${told.gone} What stands here is what came before.`;
    part("left").textContent = "–";
    part("note").textContent = "";
    document.title = "Gone · Cosmati";
  }

  async function ask() {
    clearTimeout(timer);
    if (document.hidden || asking) return;
    asking = true;
    let isOver = false;
    try {
      const answer = await fetch(`${job.dataset.lines}?after=${after}`, { cache: "no-store" });
      if (answer.ok) {
        const told = await answer.json();
        failures = 0;
        if (told.gone) removed(told);
        else isOver = shown(told);
      } else {
        failures++;
        part("note").textContent = `The server answers ${answer.status}. This page asks again.`;
      }
    } catch {
      failures++;
      part("note").textContent = "No answer: the server was ended, or this machine is busy. This page asks again; what it shows is what came last.";
      job.dataset.status = "unanswered";
    }
    asking = false;
    const wait = failures ? Math.min(10000, interval * 2 ** Math.min(failures, 5)) : going ? interval : Math.max(interval, 5000);
    if (!isOver) timer = setTimeout(ask, wait);
  }

  // Between two answers the newest figure grows older too, and all the more where none comes.
  function aged() {
    if (old === null) return;
    const seconds = old + (performance.now() - heard) / 1000;
    part("age").textContent = `written ${seconds < 100 ? `${Math.round(seconds)} s` : seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`} ago`;
  }

  function saved(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function save(chart, format) {
    const name = chart.name.replace(/[^\p{L}\p{N}]+/gu, "-");
    if (format === "csv") {
      const quoted = `"${/^[=+\-@\t\r]/.test(chart.name) ? "'" : ""}${chart.name.replaceAll('"', '""')}"`;
      const rows = chart.steps.map((step, place) => `${step},${chart.values[place]}`);
      saved(new Blob([[`step,${quoted}`, ...rows, ""].join("\n")], { type: "text/csv" }), `${name}.csv`);
    } else if (format === "svg") {
      saved(new Blob([svg(chart)], { type: "image/svg+xml" }), `${name}.svg`);
    } else {
      const from = chart.plot.ctx.canvas, canvas = document.createElement("canvas");
      canvas.width = from.width;
      canvas.height = from.height;
      const context = canvas.getContext("2d");
      context.fillStyle = colour("--surface");
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(from, 0, 0);
      canvas.toBlob((blob) => saved(blob, `${name}.png`), "image/png");
    }
  }

  // The same curve as the canvas shows, at its places, with the ticks that it has.
  function svg(chart) {
    const { plot } = chart, ratio = devicePixelRatio || 1, box = plot.bbox;
    const left = box.left / ratio, top = box.top / ratio, width = box.width / ratio, height = box.height / ratio;
    const [x, y] = plot.data, muted = colour("--muted"), font = 'font-family="system-ui, sans-serif" font-size="12"';
    const escaped = (text) => text.replace(/[&<>"]/g, (mark) => `&#${mark.charCodeAt(0)};`);
    const place = (value, scale) => plot.valToPos(value, scale) + (scale === "x" ? left : top);
    const line = x.map((step, index) => `${place(step, "x").toFixed(1)},${place(y[index], "y").toFixed(1)}`).join(" ");
    const ticks = [
      ...plot.axes[0]._splits.map((tick) => `<text x="${place(tick, "x").toFixed(1)}" y="${top + height + 18}" text-anchor="middle" fill="${muted}" ${font}>${tick}</text>`),
      ...plot.axes[1]._splits.filter((tick) => tick !== null).map((tick) => `<line x1="${left}" x2="${left + width}" y1="${place(tick, "y").toFixed(1)}" y2="${place(tick, "y").toFixed(1)}" stroke="${colour("--rule")}"/><text x="${left - 8}" y="${(place(tick, "y") + 4).toFixed(1)}" text-anchor="end" fill="${muted}" ${font}>${short(tick)}</text>`),
    ];
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${plot.width}" height="${plot.height + 24}" viewBox="0 -24 ${plot.width} ${plot.height + 24}"><title>${escaped(chart.name)}</title><rect y="-24" width="100%" height="100%" fill="${colour("--surface")}"/><text x="8" y="-6" fill="${colour("--ink")}" ${font}>${escaped(chart.name)}</text>${ticks.join("")}<polyline fill="none" stroke="${colour("--accent")}" stroke-width="1.6" points="${line}"/></svg>`;
  }

  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.elements.smoothing.addEventListener("input", () => charts.forEach((chart) => chart.steps.length && drawn(chart)));
  controls.elements.log.addEventListener("change", anew);
  document.addEventListener("visibilitychange", ask);
  document.addEventListener("cosmati:theme", anew);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
  new ResizeObserver(() => {
    for (const { plot, figure } of charts.values()) {
      const width = figure.querySelector(".canvas").clientWidth;
      if (plot && width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }).observe(part("charts"));
  setInterval(aged, 1000);
  ask();
})();
