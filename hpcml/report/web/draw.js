// Elements, scales and axes.

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// Children that are text become text: nothing of a run is ever read as markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function choice(label, options, chosen, change) {
  const select = element("select", { onchange: () => change(select.value) });
  for (const [value, text] of options) select.append(element("option", { value, selected: value === chosen }, text));
  return element("label", {}, label, select);
}

function checkbox(label, checked, change) {
  const input = element("input", { type: "checkbox", checked, onchange: () => change(input.checked) });
  return element("label", {}, input, label);
}

// --- numbers and times as text

function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (value === 0 || (Number.isInteger(value) && Math.abs(value) < 1e6)) return String(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function moment(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "";
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value) ?? "";
}

// --- scales: functions from a value to a place, null where it has none

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

function linear([low, high], [from, to]) {
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const scale = (value) => (value === null || value === undefined ? null : from + ((value - low) / (high - low)) * (to - from));
  scale.invert = (place) => low + ((place - from) / (to - from)) * (high - low);
  scale.ticks = (count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(Number((n * step).toPrecision(12)));
    return ticks;
  };
  scale.format = number;
  return scale;
}

function logarithmic([low, high], range) {
  if (!(low > 0)) [low, high] = [high > 0 ? high / 10 : 0.1, high > 0 ? high : 1];
  if (low === high) [low, high] = [low / 2, high * 2];
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  const scale = (value) => (value > 0 ? inner(Math.log10(value)) : null);
  scale.invert = (place) => 10 ** inner.invert(place);
  scale.ticks = (count) => {
    const decades = Math.log10(high / low), digits = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 2, 5] : [1];
    const within = (every) => {
      const ticks = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += every)
        for (const digit of digits) {
          const value = Number((digit * 10 ** e).toPrecision(6));
          if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
        }
      return ticks;
    };
    for (let every = Math.max(1, Math.ceil(decades / count)); every >= 1; every--) {
      const ticks = within(every);
      if (ticks.length > 1) return ticks;
    }
    return [low, high];
  };
  scale.format = number;
  return scale;
}

// Seconds since the beginning.
function elapsed(domain, range) {
  const scale = linear(domain, range);
  scale.ticks = (count) => {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
    const rough = (domain[1] - domain[0]) / count, step = steps.find((s) => s >= rough) ?? Math.ceil(rough / 604800) * 604800;
    const ticks = [];
    for (let at = 0; at <= domain[1]; at += step) ticks.push(at);
    return ticks;
  };
  scale.format = (s) => (s === 0 ? "0" : s % 86400 === 0 ? `${s / 86400} d` : s % 3600 === 0 ? `${s / 3600} h` : s >= 3600 ? `${Number((s / 3600).toFixed(2))} h` : s % 60 === 0 ? `${s / 60} min` : s > 60 ? `${Number((s / 60).toFixed(1))} min` : `${s} s`);
  return scale;
}

function categories(values, [from, to]) {
  const places = new Map(values.map((value, place) => [value, from + ((place + 0.5) / values.length) * (to - from)]));
  const scale = (value) => places.get(text(value)) ?? null;
  scale.invert = null;
  scale.ticks = () => values;
  scale.format = (value) => (value.length > 16 ? value.slice(0, 15) + "…" : value);
  scale.width = Math.abs(to - from) / values.length;
  return scale;
}

// The scale that suits the values of a parameter.
function parameterScale(values, range, pad = 0.06) {
  const numbers = values.every((value) => typeof value === "number");
  if (!numbers) return categories([...new Set(values.map(text))].sort(), range);
  const [low, high] = extent(values), gap = (range[1] - range[0]) * pad;
  const inner = [range[0] + gap, range[1] - gap];
  return low > 0 && high / low >= 30 ? logarithmic([low, high], inner) : linear([low, high], inner);
}

// A drawing with axes; what is drawn into it goes into the group that is returned with it.
function axes(holder, { height, label, xLabel, yLabel, makeX, makeY, left = 64 }) {
  const width = Math.max(280, holder.clientWidth || 600), bottom = 38, top = 10, right = 14;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  const x = makeX([left, width - right]), y = makeY([height - bottom, top]);
  const grid = shape("path", { class: "lines" });
  let lines = "";
  const names = [];
  let last = -Infinity;
  for (const tick of x.ticks(Math.max(2, Math.floor(width / 110)))) {
    const at = x(tick), shown = x.format(tick), half = shown.length * 3.6;
    if (at === null) continue;
    lines += `M${at} ${top}V${height - bottom}`;
    if (at - half < last) continue;
    last = at + half + 6;
    names.push(shape("text", { x: at, y: height - bottom + 16, "text-anchor": "middle" }, shown));
  }
  for (const tick of y.ticks(Math.max(2, Math.floor(height / 50)))) {
    const at = y(tick);
    if (at === null) continue;
    lines += `M${left} ${at}H${width - right}`;
    names.push(shape("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, y.format(tick)));
  }
  grid.setAttribute("d", lines);
  const plot = shape("g");
  svg.append(grid, ...names, shape("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
  svg.append(shape("text", { class: "name", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, xLabel));
  svg.append(shape("text", { class: "name", x: 0, y: 0, "text-anchor": "middle", transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)` }, yLabel.length > 32 ? yLabel.slice(0, 31) + "…" : yLabel));
  svg.append(plot);
  holder.replaceChildren(svg);
  return { svg, plot, x, y, width };
}

// --- colours that people with any kind of colour vision can tell apart

const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6bb1", "#8a8a8a"];
const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];

const dark = () => document.documentElement.dataset.theme === "dark";

// A colour for a share from 0 to 1; the end of the scale that the ground would swallow is left out.
function shade(share) {
  const [low, high] = dark() ? [0.25, 1] : [0.05, 0.88];
  const at = (low + Math.min(1, Math.max(0, share)) * (high - low)) * (VIRIDIS.length - 1);
  const first = VIRIDIS[Math.floor(at)], second = VIRIDIS[Math.min(VIRIDIS.length - 1, Math.floor(at) + 1)];
  return `rgb(${first.map((value, n) => Math.round(value + (second[n] - value) * (at % 1))).join(",")})`;
}

const ofState = (state) => `var(--${state})`;

// --- what the pointer is at

const tip = document.getElementById("tip");

function pointed(node, describe, click) {
  node.addEventListener("pointerover", (event) => {
    const said = describe(event.target);
    tip.hidden = !said;
    tip.textContent = said ?? "";
  });
  node.addEventListener("pointermove", (event) => {
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  node.addEventListener("pointerleave", () => (tip.hidden = true));
  if (click) node.addEventListener("click", (event) => click(event.target));
}
