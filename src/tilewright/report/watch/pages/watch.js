// Asks the server once per second for what is new, and keeps what is on the screen: runs, x axis, zoom.

import { Chart } from "./chart.js";
import { showEvents, showOffered, showRuns, showSamples, showSettings, showSystem } from "./panels.js";

const EVERY_MS = 1000;
const RETRY_MS = 2000;
const NUM_COLOURS = 8;
const at = (id) => document.getElementById(id);

const KNOWN = [
  { metric: "loss", title: "Loss", unit: "nats per token; dots: held out", log: "auto", dots: "held_out", wide: true },
  { metric: "held_out", title: "Held-out loss", unit: "nats per token", log: "auto" },
  { metric: "tokens_per_s", title: "Throughput", unit: "tokens/s", format: "count", zero: true },
  { metric: "grad_norm", title: "Gradient norm", unit: "global norm", log: "auto" },
  { metric: "memory_bytes", title: "Peak memory", unit: "bytes of the device", format: "bytes", zero: true },
  { metric: "lr", title: "Learning rate", unit: "learning rate", zero: true },
  { metric: "wait_share", title: "Waiting for data", unit: "of the step", format: "percent", zero: true },
];
const LATER = {
  step_s: { title: "Step time", unit: "seconds", format: "seconds", zero: true },
  wait_s: { title: "Wait for data", unit: "seconds per step", format: "seconds", zero: true },
  loss_scale: { title: "Loss scale", unit: "loss scale", log: "auto" },
  energy_j: { title: "Energy", unit: "joules of the run", format: "joules", zero: true },
  energy_j_per_step: { title: "Energy of a step", unit: "joules", format: "joules", zero: true },
};

const state = { runs: [], keys: null, colours: {}, x: "step", zoom: null, session: null, asked: 0, timer: 0, settings: "", panels: "" };
const charts = new Map();

const view = {
  get x() {
    return state.x;
  },
  domain,
  hover(chart, value) {
    for (const other of charts.values()) other.mark(value, other === chart);
  },
  zoom(from, to) {
    state.zoom = [from, to];
    refetch();
  },
  reset() {
    state.zoom = null;
    refetch();
  },
};

// The range of x of all curves that are shown, so that charts are aligned.
function domain() {
  if (state.zoom) return state.zoom;
  let [low, high] = [Infinity, -Infinity];
  for (const run of state.runs) {
    for (const curve of Object.values(run.curves || {})) {
      low = Math.min(low, curve.x[0]);
      high = Math.max(high, curve.x[curve.x.length - 1]);
    }
  }
  if (low > high) return [0, 1];
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

function colourOf(key) {
  if (!(key in state.colours)) {
    const taken = new Set(state.runs.map((run) => state.colours[run.key]));
    state.colours[key] = [...Array(NUM_COLOURS).keys()].find((colour) => !taken.has(colour)) ?? 0;
  }
  return state.colours[key];
}

// ---- asking ----

function address() {
  const fields = new URLSearchParams({ x: state.x });
  if (state.keys) fields.set("runs", state.keys.join(","));
  const known = state.runs.filter((run) => run.curves && !run.stale).map((run) => `${run.key}:${run.version}`);
  if (known.length) fields.set("known", known.join(","));
  if (state.zoom) {
    fields.set("from", state.zoom[0]);
    fields.set("to", state.zoom[1]);
  }
  return `/api/view?${fields}`;
}

// Everything again, at once: the axis, the zoom or the choice of runs changed.
function refetch() {
  for (const run of state.runs) run.stale = true;
  drawAll();
  ask();
}

async function ask() {
  clearTimeout(state.timer);
  const number = ++state.asked;
  let found;
  try {
    const answer = await fetch(address(), { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    found = await answer.json();
  } catch (error) {
    if (number !== state.asked) return;
    lost(error);
    state.timer = setTimeout(ask, RETRY_MS);
    return;
  }
  if (number !== state.asked) return; // a later question has been asked
  if (state.session && state.session !== found.session) {
    location.reload(); // the server was started again: its keys mean other runs
    return;
  }
  state.session = found.session;
  at("lost").hidden = true;
  at("updated").textContent = `· updated ${new Date().toLocaleTimeString("en-GB")}`;
  take(found);
  if (!document.hidden) state.timer = setTimeout(ask, EVERY_MS);
}

function lost(error) {
  at("lost").hidden = false;
  at("lost").textContent = `The watching command does not answer (${error.message}). The page shows what it got last, and asks again.`;
}

function take(found) {
  const before = new Map(state.runs.map((run) => [run.key, run]));
  let changed = state.runs.length !== found.runs.length;
  const runs = found.runs.map((run) => {
    const old = before.get(run.key);
    if (run.curves) changed = true;
    const kept = run.curves || !old ? run : { ...old, ...run };
    return { ...kept, stale: false };
  });
  state.runs = runs;
  for (const run of runs) run.colour = colourOf(run.key);
  state.keys = runs.map((run) => run.key);
  showOffered(at("offered"), found.offered, add);
  showSystem(at("system"), found.system);
  const panels = JSON.stringify(runs.map((run) => [run.key, run.status, run.version, run.trouble]));
  if (panels !== state.panels) {
    state.panels = panels;
    showRuns(at("runs"), runs, remove);
    showEvents(at("event-tables"), runs);
    showSamples(at("sample-texts"), runs);
  }
  const settings = JSON.stringify([runs.map((run) => run.key), found.settings]);
  if (settings !== state.settings) {
    state.settings = settings;
    showSettings(runs, found.settings);
  }
  if (changed) showCharts();
  document.title = title(runs);
  performance.mark("shown");
}

function title(runs) {
  const loss = runs.length === 1 ? runs[0].curves?.loss?.last : null;
  return `${loss ? `${loss.toPrecision(4)} · ` : ""}${runs.map((run) => run.name).join(", ")} · tilewright watch`;
}

function add(key) {
  state.keys = [...state.keys, key].slice(-NUM_COLOURS);
  refetch();
}

function remove(key) {
  state.keys = state.keys.filter((other) => other !== key);
  delete state.colours[key];
  state.runs = state.runs.filter((run) => run.key !== key);
  refetch();
}

// ---- charts ----

function words(metric) {
  const [domain, rest] = metric.split("/");
  return rest ? `${domain.replaceAll("_", "-")} loss: ${rest}` : metric.replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase());
}

function specs() {
  const metrics = new Set(state.runs.flatMap((run) => Object.keys(run.curves || {})));
  const first = KNOWN.filter((spec) => metrics.has(spec.metric));
  const known = new Set(KNOWN.map((spec) => spec.metric));
  const later = [...metrics].filter((metric) => !known.has(metric) && !(metric === "loss_scale" && constant(metric)))
    .map((metric) => ({ metric, title: words(metric), unit: metric.includes("/") ? "nats per token" : metric, log: "auto", ...LATER[metric] }));
  return { first, later };
}

function constant(metric) {
  return state.runs.every((run) => (run.curves?.[metric]?.y ?? []).every((value) => value === 1));
}

function place(box, wanted) {
  const figures = wanted.map((spec) => {
    if (!charts.has(spec.metric)) charts.set(spec.metric, new Chart(spec, view));
    return charts.get(spec.metric).figure;
  });
  if (figures.some((figure, i) => box.children[i] !== figure) || box.children.length !== figures.length) box.replaceChildren(...figures);
}

function showCharts() {
  const { first, later } = specs();
  place(at("charts"), first);
  place(at("more-charts"), later);
  at("more").hidden = later.length === 0;
  at("more-count").textContent = String(later.length);
  at("waiting").hidden = first.length + later.length > 0;
  at("waiting").textContent = "No metrics yet. The curves appear with the first step.";
  for (const spec of [...first, ...later]) {
    const curves = state.runs.filter((run) => run.curves?.[spec.metric]).map((run) => ({
      key: run.key, name: run.name, colour: run.colour, data: run.curves[spec.metric], dots: spec.dots && run.curves[spec.dots],
    }));
    charts.get(spec.metric).show(curves);
  }
  showZoom();
}

function drawAll() {
  for (const chart of charts.values()) chart.draw();
  showZoom();
}

function showZoom() {
  at("reset").hidden = !state.zoom;
  at("zoomed").textContent = state.zoom ? "Double click, Escape or" : "Drag in a chart to zoom, point at it for values.";
}

for (const button of document.querySelectorAll("[data-x]")) {
  button.addEventListener("click", () => {
    state.x = button.dataset.x;
    state.zoom = null;
    for (const other of document.querySelectorAll("[data-x]")) other.setAttribute("aria-pressed", String(other === button));
    for (const run of state.runs) run.stale = true; // drawn when the answer is here: its x is another
    ask();
  });
}
at("reset").addEventListener("click", view.reset);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.zoom) view.reset();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) ask();
});
ask();
