// The parts of the page that are not charts: runs, system load, settings, events, samples. All text is set as text.

import { element } from "./chart.js";
import { FORMATS, bytes, number, percent } from "./format.js";

const STATES = {
  running: "good", finished: "good", "stopped early": "look", killed: "bad", deleted: "bad", "no data yet": "not_measured",
};
const NUM_LOAD_SAMPLES = 60;

function key(colour) {
  const mark = element("i", { class: "key" });
  mark.style.setProperty("--key", `var(--c${colour})`);
  return mark;
}

function perplexity(loss) {
  const value = Math.exp(loss);
  return Number.isFinite(value) ? number(value) : `e^${number(loss)}`;
}

function figures(run) {
  const last = (metric) => run.curves?.[metric]?.last ?? null;
  const found = [];
  if (last("loss") !== null) found.push(["loss", number(last("loss"))]);
  if (last("held_out") !== null) found.push(["perplexity", perplexity(last("held_out"))]);
  if (last("tokens_per_s") !== null) found.push(["tokens/s", FORMATS.count(last("tokens_per_s"))]);
  if (last("energy_j_per_step") !== null) found.push(["energy per step", FORMATS.joules(last("energy_j_per_step"))]);
  if (last("memory_bytes") !== null) found.push(["memory", bytes(last("memory_bytes"))]);
  return found;
}

// runs: with `colour`; remove(key): the run is shown no longer.
export function showRuns(list, runs, remove) {
  list.replaceChildren(...runs.map((run) => {
    const steps = Number(run.steps);
    const badge = element("span", { class: `badge state state-${STATES[run.status] || "not_measured"}` }, run.status);
    const row = element("li", { class: "run", "data-run": run.key, "data-status": run.status },
      element("p", { class: "run-name" }, key(run.colour), element("b", { title: run.path }, run.name), " ", badge));
    const step = run.step === null ? "waiting for its first step" : `step ${number(run.step)}${steps ? ` of ${number(steps)}` : ""}`;
    const done = element("span", { class: "bar" }, element("span"));
    done.firstChild.style.width = `${Math.min(100, steps && run.step ? (100 * run.step) / steps : 0)}%`;
    done.firstChild.style.setProperty("--key", `var(--c${run.colour})`);
    row.append(element("p", { class: "progress" }, step, done));
    row.append(element("dl", {}, ...figures(run).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
    const gone = run.status === "deleted";
    if (gone) row.append(element("p", { class: "gone" }, "The run folder was deleted. What was read of it stays until this page is closed."));
    for (const line of run.trouble) row.append(element("p", { class: "gone" }, line));
    const actions = element("p", { class: "actions" });
    if (!gone) actions.append(element("a", { href: `/report/${run.key}`, download: "", class: "download" }, "Download report"));
    if (runs.length > 1) {
      const button = element("button", { type: "button", "aria-label": `Hide ${run.name}` }, "Hide");
      button.addEventListener("click", () => remove(run.key));
      actions.append(button);
    }
    row.append(actions);
    return row;
  }));
}

export function showOffered(box, offered, add) {
  box.hidden = offered.length === 0;
  const shown = offered.slice(0, 12);
  const chips = shown.map((run) => {
    const button = element("button", { type: "button", "data-run": run.key, class: run.new ? "chip new" : "chip" }, `+ ${run.name}`);
    if (run.new) button.append(element("b", {}, "new"));
    button.addEventListener("click", () => add(run.key));
    return button;
  });
  const more = offered.length - shown.length;
  box.replaceChildren(element("span", {}, "Compare with"), ...chips, more > 0 ? `and ${more} older` : "");
}

// Shares of the last minute as a small line; history is kept by the page.
const history = {};

function sparkline(name, share) {
  const kept = history[name] ??= [];
  kept.push(Math.min(Math.max(share ?? 0, 0), 1));
  if (kept.length > NUM_LOAD_SAMPLES) kept.shift();
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 120 22");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("preserveAspectRatio", "none");
  const start = 120 - (kept.length - 1) * (120 / (NUM_LOAD_SAMPLES - 1));
  const points = kept.map((value, i) => `${(start + i * (120 / (NUM_LOAD_SAMPLES - 1))).toFixed(1)},${(21 - value * 20).toFixed(1)}`);
  const area = document.createElementNS("http://www.w3.org/2000/svg", "path");
  area.setAttribute("d", `M${start.toFixed(1)},22L${points.join("L")}L120,22Z`);
  area.setAttribute("class", "spark");
  svg.append(area);
  return svg;
}

export function showSystem(list, load) {
  const memory = load.memory_used_bytes / load.memory_bytes;
  const tiles = [
    ["CPU", `${Math.round(load.cpu_percent)} %`, `of ${load.cores} ${load.cores === 1 ? "core" : "cores"}`, load.cpu_percent / 100],
    ["Memory", percent(Math.round(memory * 100) / 100), `${bytes(load.memory_used_bytes)} of ${bytes(load.memory_bytes)}`, memory],
  ];
  if (load.disk_free_bytes !== null) {
    const rates = load.disk_write_bytes_per_s === null ? "" : `read ${bytes(load.disk_read_bytes_per_s)}/s, write ${bytes(load.disk_write_bytes_per_s)}/s`;
    tiles.push(["Disk", `${bytes(load.disk_free_bytes)} free`, rates, null]);
  }
  const power = load.processors;
  tiles.push(["Power", power.watts === null ? "unavailable" : `${Math.round(power.watts)} W`, power.watts === null ? power.reason : "processors, by their counters", null]);
  load.gpus.forEach((gpu, i) => {
    const held = gpu.memory_bytes === null ? "" : `, ${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_bytes)}`;
    tiles.push([`GPU ${i}`, gpu.percent === null ? "not known" : `${gpu.percent} %`, `${gpu.name}${held}`, gpu.percent === null ? null : gpu.percent / 100]);
  });
  list.replaceChildren(...tiles.map(([name, value, detail, share]) => {
    const tile = element("div", {}, element("dt", {}, name), element("dd", { class: "value" }, value), element("dd", { class: "detail" }, detail));
    if (share !== null) tile.append(element("dd", { class: "trend" }, sparkline(name, share)));
    return tile;
  }));
}

function settingsTable(runs, rows, marked) {
  const head = element("tr", {}, element("th", {}, "setting"), ...runs.map((run) => element("th", {}, key(run.colour), run.name)));
  const body = rows.map((row) => {
    const line = element("tr", { "data-setting": row.name, class: marked && row.differs ? "differs" : "" });
    line.append(element("td", {}, element("code", {}, row.name)));
    for (const value of row.values) line.append(element("td", { class: value === null ? "none" : "" }, value === null ? "none" : element("code", {}, value)));
    return line;
  });
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

export function showSettings(runs, rows) {
  const differing = rows.filter((row) => row.differs);
  const chosen = rows.filter((row) => row.chosen);
  const box = document.getElementById("differing");
  if (runs.length > 1 && differing.length) {
    box.replaceChildren(element("p", { class: "lead" }, `${differing.length} of ${rows.length} settings differ.`), settingsTable(runs, differing, true));
  } else if (runs.length > 1) {
    box.replaceChildren(element("p", { class: "missing" }, "All settings are equal."));
  } else if (chosen.length) {
    box.replaceChildren(element("p", { class: "lead" }, `${chosen.length} of ${rows.length} settings are not the default.`), settingsTable(runs, chosen, false));
  } else {
    box.replaceChildren(element("p", { class: "missing" }, "All settings have their defaults."));
  }
  document.getElementById("settings-count").textContent = String(rows.length);
  document.getElementById("all-settings").replaceChildren(settingsTable(runs, rows, true));
}

export function showEvents(box, runs) {
  const blocks = runs.map((run) => {
    const rows = (run.events || []).map((event) => element("tr", {},
      element("td", { class: "no" }, event.step === null ? "" : number(event.step)), element("td", { class: "when" }, event.time),
      element("td", {}, element("span", { class: `kind kind-${event.kind}` }, event.kind.replaceAll("_", " "))), element("td", {}, event.message)));
    const head = element("tr", {}, element("th", { class: "no" }, "step"), element("th", {}, "time"), element("th", {}, "kind"), element("th", {}, "what happened"));
    const title = element("h3", {}, key(run.colour), run.name);
    if (!rows.length) return element("div", { class: "events" }, title, element("p", { class: "missing" }, "No events yet."));
    return element("div", { class: "events" }, title, element("div", { class: "scroll tall" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))));
  });
  box.replaceChildren(...blocks);
}

export function showSamples(box, runs) {
  box.replaceChildren(...runs.map((run) => {
    const sample = (run.samples || [])[0];
    const block = element("div", { class: "sample" }, element("h3", {}, key(run.colour), run.name));
    if (!sample) {
      block.append(element("p", { class: "missing" }, "No sample yet."));
    } else {
      block.append(element("p", { class: "where" }, `step ${number(sample.step)}`), element("pre", {}, element("mark", {}, sample.prompt), sample.text));
    }
    return block;
  }));
}
