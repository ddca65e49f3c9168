// One chart: the curves of several runs over a common x axis, with values under the pointer and a zoom by dragging.
// Colours, light and dark, are classes of the report's style sheet.

import { FORMATS, logTicks, tick, ticks } from "./format.js";

const LEFT = 58, RIGHT = 14, TOP = 26, BOTTOM = 34;
const WIDE_RANGE = 20; // largest over smallest value from which an axis may be logarithmic
const SMALLEST_DRAG = 6; // pixels
const SVG = "http://www.w3.org/2000/svg";
let made = 0;

function shape(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const X_FORMATS = { step: FORMATS.number, time: FORMATS.seconds, tokens: FORMATS.count };

// The last index whose x is at most `value`, or the one after it where that is nearer.
export function nearest(xs, value) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (xs[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low + 1 < xs.length && Math.abs(xs[low + 1] - value) < Math.abs(xs[low] - value) ? low + 1 : low;
}

export class Chart {
  // spec: metric, title, unit, format, zero, log ("auto" or false), dots (metric drawn as dots), wide.
  // view: {x, domain, hover(chart, value), zoom(from, to), reset()}.
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.format = FORMATS[spec.format || "number"];
    this.curves = [];
    this.legend = element("ul", { class: "legend" });
    this.svg = shape("svg", { role: "img", "aria-label": `${spec.title} over ${view.x}`, class: "plot" });
    this.tip = element("div", { class: "tip-box", hidden: "" });
    this.note = element("p", { class: "chart-note", hidden: "" });
    this.figure = element("figure", { class: spec.wide ? "wide" : "", "data-metric": spec.metric },
      element("h3", {}, spec.title), this.legend, this.svg, this.note, this.tip);
    this.clip = `clip${made++}`;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  // curves: [{key, name, colour, data: {x, y, low, high, last, not_finite}, dots: the same or undefined}]
  show(curves) {
    this.curves = curves;
    this.legend.replaceChildren(...curves.map((curve) => {
      const key = element("i");
      key.style.setProperty("--key", `var(--c${curve.colour})`);
      return element("li", {}, key, `${curve.name} `, element("b", {}, this.format(curve.data.last)));
    }));
    const missing = curves.filter((curve) => curve.data.not_finite)
      .map((curve) => `${curve.name}: ${curve.data.not_finite.toLocaleString("en-US")} values are not finite, and not drawn.`);
    this.note.textContent = missing.join(" ");
    this.note.hidden = missing.length === 0;
    this.draw();
  }

  draw() {
    const width = Math.round(this.figure.clientWidth - 42);
    if (width < 80 || !this.curves.length) return;
    this.width = width;
    this.height = this.spec.wide && width > 700 ? 320 : 240;
    this.x = this.xScale();
    this.y = this.yScale();
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("aria-label", `${this.spec.title} over ${this.view.x}`);
    this.axes();
    const clip = shape("clipPath", { id: this.clip }, this.svg);
    shape("rect", { x: LEFT - 4, y: TOP - 6, width: width - LEFT - RIGHT + 8, height: this.height - TOP - BOTTOM + 10 }, clip);
    const drawn = shape("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    for (const curve of this.curves) this.line(curve, drawn);
    this.selection = shape("rect", { class: "selection", y: TOP - 6, height: this.height - TOP - BOTTOM + 6, width: 0 }, this.svg);
    this.cursor = shape("g", { class: "cursor" }, this.svg);
    if (this.hovered !== undefined) this.mark(this.hovered);
  }

  xScale() {
    const [low, high] = this.view.domain();
    const span = this.width - LEFT - RIGHT;
    const scale = (value) => LEFT + ((value - low) / (high - low)) * span;
    return Object.assign(scale, { low, high, back: (at) => low + ((at - LEFT) / span) * (high - low) });
  }

  // All values in view; the mean of a stretch may hide a spike, its lowest and highest value do not.
  *values() {
    for (const curve of this.curves) {
      for (const data of [curve.data, curve.dots]) {
        if (!data) continue;
        for (let i = 0; i < data.x.length; i += 1) {
          if (data.x[i] < this.x.low || data.x[i] > this.x.high || data.y[i] === null) continue;
          yield data.y[i];
          if (data.low) yield* [data.low[i], data.high[i]];
        }
      }
    }
  }

  yScale() {
    let [low, high] = [Infinity, -Infinity];
    for (const value of this.values()) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) [low, high] = [0, 1];
    this.log = this.spec.log === "auto" && low > 0 && high / low >= WIDE_RANGE;
    const top = TOP;
    const base = this.height - BOTTOM;
    if (this.log) {
      const [a, b] = [Math.log(low / 1.1), Math.log(Math.min(high, 1e300) * 1.1)];
      const scale = (value) => (value > 0 ? base - ((Math.log(value) - a) / (b - a)) * (base - top) : base + 99);
      return Object.assign(scale, { low: Math.exp(a), high: Math.exp(b) });
    }
    if (this.spec.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    const pad = high - low > 1e-9 * Math.max(Math.abs(high), Math.abs(low), 1e-9) ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 0.5;
    if (!(this.spec.zero && low === 0)) low -= pad;
    if (!(this.spec.zero && high === 0 && low < 0)) high += pad;
    const scale = (value) => base - ((value - low) / (high - low)) * (base - top);
    return Object.assign(scale, { low, high });
  }

  axes() {
    const { width, height, svg } = this;
    const base = height - BOTTOM;
    shape("text", { class: "unit", x: 0, y: 12 }, svg).textContent = this.spec.unit + (this.log ? ", log scale" : "");
    const marks = this.log ? logTicks(this.y.low, this.y.high, 5) : ticks(this.y.low, this.y.high, 5, this.spec.format === "bytes");
    const words = this.spec.format && this.spec.format !== "number" ? this.format : tick;
    for (const value of marks) {
      const at = this.y(value).toFixed(1);
      shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }, svg);
      shape("text", { class: "tick", x: LEFT - 8, y: Number(at) + 3.5, "text-anchor": "end" }, svg).textContent = words(value);
    }
    shape("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: base, y2: base }, svg);
    let steps = ticks(this.x.low, this.x.high, Math.max(3, Math.floor(width / 130)));
    const whole = steps.filter(Number.isInteger);
    if (this.view.x !== "time" && whole.length > 1) steps = whole;
    for (const value of steps) {
      const at = this.x(value).toFixed(1);
      shape("line", { class: "axis", x1: at, x2: at, y1: base, y2: base + 4 }, svg);
      shape("text", { class: "tick xtick", x: at, y: base + 16, "text-anchor": "middle" }, svg).textContent = X_FORMATS[this.view.x](value);
    }
    shape("text", { class: "unit", x: width - RIGHT, y: height - 3, "text-anchor": "end" }, svg).textContent = this.view.x;
  }

  line(curve, parent) {
    const { data, dots, colour, key } = curve;
    if (data.low) shape("path", { class: `band c${colour}`, d: this.band(data) }, parent);
    const alone = data.x.filter((_, i) => data.y[i] !== null).length;
    shape("path", { class: `line c${colour}`, "data-run": key, d: this.path(data) }, parent);
    if (alone <= 12) this.points(data, `point c${colour}`, 2.6, parent);
    if (dots) this.points(dots, `dot c${colour}`, 3, parent);
  }

  points(data, style, radius, parent) {
    data.x.forEach((x, i) => {
      if (data.y[i] !== null) shape("circle", { class: style, cx: this.x(x).toFixed(1), cy: this.y(data.y[i]).toFixed(1), r: radius }, parent);
    });
  }

  path(data) {
    let pen = false;
    return data.x.map((x, i) => {
      if (data.y[i] === null) {
        pen = false;
        return "";
      }
      const move = pen ? "L" : "M";
      pen = true;
      return `${move}${this.x(x).toFixed(1)},${this.y(data.y[i]).toFixed(1)}`;
    }).join("");
  }

  band(data) {
    const pieces = [];
    let piece = [];
    for (let i = 0; i <= data.x.length; i += 1) {
      if (i < data.x.length && data.y[i] !== null) piece.push(i);
      else if (piece.length) {
        pieces.push(piece);
        piece = [];
      }
    }
    const at = (i, values) => `${this.x(data.x[i]).toFixed(1)},${this.y(values[i]).toFixed(1)}`;
    return pieces.map((one) => `M${[...one.map((i) => at(i, data.high)), ...one.reverse().map((i) => at(i, data.low))].join("L")}Z`).join("");
  }

  listen() {
    const place = (event) => ((event.clientX - this.svg.getBoundingClientRect().left) / this.svg.getBoundingClientRect().width) * this.width;
    const inside = (at) => Math.min(Math.max(at, LEFT), this.width - RIGHT);
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.x) return;
      this.dragged = inside(place(event));
      this.svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      const at = inside(place(event));
      if (this.dragged !== undefined) {
        this.selection.setAttribute("x", Math.min(at, this.dragged));
        this.selection.setAttribute("width", Math.abs(at - this.dragged));
      }
      this.view.hover(this, this.x.back(at));
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (this.dragged === undefined) return;
      const [from, to] = [this.dragged, inside(place(event))].sort((a, b) => a - b);
      this.dragged = undefined;
      this.selection.setAttribute("width", 0);
      if (to - from >= SMALLEST_DRAG) this.view.zoom(this.x.back(from), this.x.back(to));
    });
    this.svg.addEventListener("pointercancel", () => {
      this.dragged = undefined;
      this.selection.setAttribute("width", 0);
    });
    this.svg.addEventListener("pointerleave", () => this.view.hover(this, undefined));
    this.svg.addEventListener("dblclick", () => this.view.reset());
  }

  // A line at x in every chart, with a dot on each curve; the box with the values where the pointer is.
  mark(value, withBox = false) {
    this.hovered = value;
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    this.tip.hidden = !withBox || value === undefined;
    if (value === undefined) return;
    const rows = [];
    let at;
    for (const curve of this.curves) {
      const { data } = curve;
      if (!data.x.length || value < data.x[0] - 1e-9 || value > data.x[data.x.length - 1] + 1e-9) {
        if (data.x.length !== 1 && this.curves.length > 1) continue;
      }
      const i = nearest(data.x, value);
      at = at === undefined ? data.x[i] : at;
      rows.push({ curve, i, x: data.x[i] });
    }
    if (at === undefined) return;
    const place = this.x(at);
    if (place < LEFT - 1 || place > this.width - RIGHT + 1) {
      this.tip.hidden = true;
      return;
    }
    shape("line", { x1: place, x2: place, y1: TOP - 6, y2: this.height - BOTTOM }, this.cursor);
    for (const { curve, i, x } of rows) {
      if (curve.data.y[i] !== null) shape("circle", { class: `c${curve.colour}`, cx: this.x(x), cy: this.y(curve.data.y[i]), r: 3.4 }, this.cursor);
    }
    if (withBox) this.box(at, rows, place);
  }

  box(at, rows, place) {
    const lines = rows.map(({ curve, i }) => {
      const key = element("i");
      key.style.setProperty("--key", `var(--c${curve.colour})`);
      const { y, low, high } = curve.data;
      const spread = low && low[i] !== high[i] ? ` (${this.format(low[i])} to ${this.format(high[i])})` : "";
      return element("p", {}, key, `${curve.name} `, element("b", {}, this.format(y[i])), spread);
    });
    this.tip.replaceChildren(element("p", { class: "at" }, `${this.view.x} ${X_FORMATS[this.view.x](at)}`), ...lines);
    const scale = this.svg.getBoundingClientRect().width / this.width;
    const box = this.tip.offsetWidth;
    const origin = this.svg.getBoundingClientRect().left - this.figure.getBoundingClientRect().left;
    const right = origin + place * scale + 12;
    const fits = right + box < this.figure.clientWidth - 4;
    this.tip.style.left = `${fits ? right : Math.max(4, origin + place * scale - 12 - box)}px`;
    this.tip.style.top = `${this.svg.getBoundingClientRect().top - this.figure.getBoundingClientRect().top + 8}px`;
  }
}
