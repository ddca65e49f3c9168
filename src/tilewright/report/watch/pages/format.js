// Numbers as the report writes them: see core/units.py and report/svg/axes.py.

function trimmed(value, figures) {
  const text = value.toPrecision(figures);
  if (text.includes("e")) {
    const [digits, power] = text.split("e");
    return `${digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits}e${power}`;
  }
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function exponent(value, figures) {
  const [digits, power] = value.toExponential(figures - 1).split("e");
  const padded = power.length < 3 ? `${power[0]}0${power[1]}` : power;
  return `${digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits}e${padded}`;
}

export function number(value) {
  if (value === null || value === undefined) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return exponent(value, 3);
  if (size < 1e-3) return trimmed(value, 3);
  if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  return trimmed(value, 4);
}

export function bytes(value) {
  if (value === null || value === undefined) return "not known";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  if (size >= 1e6) return `${exponent(size, 3)} ${units[unit]}`;
  return `${size.toFixed(unit === 0 || (size >= 100 && unit < 4) ? 0 : 2)} ${units[unit]}`;
}

export function count(value) {
  if (value === null || value === undefined) return "not finite";
  const suffixes = ["", "k", "M", "G", "T", "P"];
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1000 && unit < suffixes.length - 1) {
    size /= 1000;
    unit += 1;
  }
  if (Math.abs(size) >= 1000) return exponent(value, 3);
  return unit === 0 ? number(Math.abs(size) >= 10 ? Math.round(size) : size) : `${trimmed(size, 3)}${suffixes[unit]}`;
}

export function percent(share) {
  return share === null || share === undefined ? "not finite" : `${trimmed(share * 100, 3)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "not known";
  if (value < 0.001 && value > 0) return `${trimmed(value * 1e6, 3)} µs`;
  if (value < 1 && value > 0) return `${trimmed(value * 1000, 3)} ms`;
  if (value < 60) return `${trimmed(value, 3)} s`;
  const whole = Math.round(value);
  const pad = (part) => String(part).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours}h${pad(minutes)}m` : `${minutes}m${pad(whole % 60)}s`;
}

export function joules(value) {
  if (value === null || value === undefined) return "not finite";
  if (value >= 1000) return `${trimmed(value / 1000, 3)} kJ`;
  return value >= 1 ? `${trimmed(value, 3)} J` : `${trimmed(value * 1000, 3)} mJ`;
}

// Three figures, and an exponent only where there is no room for the digits.
export function tick(value) {
  return Math.abs(value) < 1e6 ? number(value) : exponent(value, 3);
}

export const FORMATS = { number, bytes, count, percent, seconds, joules };

// Round values from low to high: multiples of 1, 2, 2.5 or 5, of a power of 1024 where `binary`.
export function ticks(low, high, wanted, binary = false) {
  if (binary) {
    const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024)));
    return ticks(low / unit, high / unit, wanted).map((value) => value * unit);
  }
  const rough = (high - low) / Math.max(wanted, 1);
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  if (!(magnitude > 0) || !Number.isFinite(magnitude)) return [low];
  const step = [1, 2, 2.5, 5, 10].map((m) => m * magnitude).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9) && found.length < 100; k += 1) {
    found.push(k === 0 ? 0 : Number((k * step).toPrecision(12)));
  }
  return found;
}

export function logTicks(low, high, wanted) {
  const decades = [];
  for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d += 1) decades.push(d);
  let found = [];
  for (const mantissas of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 8]]) {
    found = decades.flatMap((d) => mantissas.map((m) => m * 10 ** d)).filter((t) => t >= low && t <= high);
    if (found.length >= Math.min(wanted, 4) - 1) break;
  }
  if (found.length < 2) return ticks(low, high, wanted).filter((t) => t > 0);
  const stride = Math.ceil(found.length / (2 * wanted));
  return found.filter((_, i) => i % stride === 0);
}
