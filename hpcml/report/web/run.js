// The run, and which of its cells are shown.

const run = JSON.parse(document.getElementById("data").textContent);
const byIndex = new Map(run.cells.map((cell) => [cell.index, cell]));
const objective = run.objective ? run.objective[0] : null;
const metrics = [...new Set(run.cells.flatMap((cell) => Object.keys(cell.metrics)))].sort((a, b) => (b === objective) - (a === objective) || b.includes("loss") - a.includes("loss") || (a < b ? -1 : 1));
const bestFirst = (a, b) => (a.rank ?? Infinity) - (b.rank ?? Infinity) || a.index - b.index;

// Those that are picked last, so that they are drawn over the others.
const pickedLast = (a, b) => view.picked.has(a.index) - view.picked.has(b.index);

const view = { states: new Set(Object.keys(run.counts)), words: "", ranges: new Map(), picked: new Set() };
const drawings = [];

const brief = (value) => (typeof value === "number" ? number(value) : text(value));
const parameters = (cell) => run.swept.filter((name) => name in cell.params).map((name) => `${name}=${brief(cell.params[name])}`).join(", ");
const title = (cell) => `cell ${cell.index}` + (run.swept.length ? `: ${parameters(cell)}` : "");

function describe(cell) {
  const lines = [title(cell), cell.state + (cell.rank ? `, rank ${cell.rank}` : "")];
  if (objective && cell.metrics[objective] !== undefined) lines.push(`${objective} ${number(cell.metrics[objective])}`);
  if (cell.reason) lines.push(cell.reason);
  return lines.join("\n");
}

// By the title of a column: a metric may have the name of a parameter.
const titled = new Map(["params", "metrics"].flatMap((kind) => Object.entries(run.titles[kind]).map(([name, column]) => [column, (cell) => cell[kind][name]])));
const valueOf = (cell, name) => (titled.has(name) ? titled.get(name)(cell) : name in cell.params ? cell.params[name] : name in cell.metrics ? cell.metrics[name] : cell[name]);

const COMPARE = { "=": (a, b) => text(a) === b || (typeof a === "number" && a === Number(b)), "<": (a, b) => a < Number(b), ">": (a, b) => a > Number(b), "<=": (a, b) => a <= Number(b), ">=": (a, b) => a >= Number(b) };

// Each word must hold: `name<0.1` compares, any other one is looked for in what describes the cell.
function holds(word) {
  const match = /^([^<>=]+)(<=|>=|=|<|>)(.+)$/.exec(word);
  if (match) {
    const [, name, sign, wanted] = match;
    return (cell) => {
      const value = valueOf(cell, name);
      return value !== null && value !== undefined && COMPARE[sign](value, wanted);
    };
  }
  const lower = word.toLowerCase();
  return (cell) => `${cell.id} ${title(cell)} ${cell.state} ${cell.reason}`.toLowerCase().includes(lower);
}

function shownCells() {
  const tests = view.words.split(/\s+/).filter(Boolean).map(holds);
  for (const { test } of view.ranges.values()) tests.push(test);
  return run.cells.filter((cell) => view.states.has(cell.state) && tests.every((test) => test(cell)));
}

function redraw() {
  const cells = shownCells();
  document.getElementById("shown").textContent = `${cells.length} of ${run.cells.length} cells`;
  for (const draw of drawings) draw(cells);
}

function pick(index) {
  if (!view.picked.delete(index)) view.picked.add(index);
  redraw();
}

// A part of the page. `draw` gets the cells that are shown, now and whenever they change.
function section(id, heading, draw, ...parts) {
  const node = element("section", { id }, element("h2", {}, heading), ...parts);
  document.querySelector("main").append(node);
  if (draw) drawings.push(draw);
  return node;
}
