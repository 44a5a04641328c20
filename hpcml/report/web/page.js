// The page from top to bottom.

function summary() {
  document.title = `${run.name} ${run.run_id}: hpcml report`;
  document.querySelector("h1").textContent = run.name;
  document.getElementById("about").textContent = `${run.run_id} · ${run.kind} on ${run.scheduler} · as of ${moment(run.made)} · hpcml ${run.version} · ${run.path}`;
  const tile = (value, name) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name));
  const best = run.cells.find((cell) => cell.rank === 1);
  const starts = run.attempts.map((attempt) => attempt.started), last = Math.max(...run.attempts.map((attempt) => attempt.ended ?? run.made));
  const worked = run.attempts.reduce((sum, attempt) => sum + (attempt.ended ?? run.made) - attempt.started, 0);
  const tiles = element("div", { class: "tiles" }, tile(run.cells.length, run.cells.length === 1 ? "cell" : "cells"), ...Object.entries(run.counts).map(([state, count]) => {
    const node = tile(count, "");
    node.lastChild.append(element("span", { class: "state", style: `--of:${ofState(state)}` }, state));
    return node;
  }));
  if (starts.length) {
    let first = starts[0];
    for (const start of starts) first = Math.min(first, start);
    tiles.append(tile(duration(last - first), "from the first start"), tile(duration(worked), "of work in all attempts"), tile(run.attempts.length, run.attempts.length === 1 ? "attempt" : "attempts"));
  }
  if (best) tiles.append(tile(number(best.metrics[objective]), `${run.objective[1] === "min" ? "smallest" : "largest"} ${objective}: cell ${best.index}`));
  const bar = element("div", { class: "bar", role: "img", "aria-label": Object.entries(run.counts).map(([state, count]) => `${count} ${state}`).join(", ") }, ...Object.entries(run.counts).map(([state, count]) => element("span", { style: `flex:${count};background:${ofState(state)}` })));
  const more = [];
  if (best && run.swept.length) more.push(element("p", {}, `The best: ${title(best)}`));
  if (run.search) more.push(element("p", { class: "note" }, `Search by ${run.search.sampler} for the ${run.search.mode} of ${run.search.metric}: ${run.search.cells.length} rounds of ${run.search.cells[0]} cells.`));
  if (run.halving) more.push(element("p", { class: "note" }, `Halving by ${run.halving.metric}: ${run.halving.cells.map((count, n) => `${count} cells to step ${run.halving.steps[n]}`).join(", ")}.`));
  section("summary", "Summary", null, tiles, bar, ...more);
}

function filter() {
  const form = document.getElementById("filter");
  form.addEventListener("submit", (event) => event.preventDefault());
  const boxes = Object.entries(run.counts).map(([state, count]) => {
    const label = checkbox("", true, (on) => { view.states[on ? "add" : "delete"](state); redraw(); });
    label.append(element("span", { class: "state", style: `--of:${ofState(state)}` }, `${state} ${count}`));
    label.firstChild.name = state;
    return label;
  });
  const words = element("input", { type: "search", name: "words", "aria-label": "Words that cells must match", placeholder: `words, or ${run.swept[0] ?? "name"}=value, name<0.1, name>=3`, oninput: () => { view.words = words.value; redraw(); } });
  const all = element("button", { type: "button", onclick: () => {
    view.states = new Set(Object.keys(run.counts));
    for (const label of boxes) label.firstChild.checked = true;
    view.words = words.value = "";
    view.ranges.clear();
    view.picked.clear();
    redraw();
  } }, "all cells");
  form.append(...boxes, words, all, element("output", { id: "shown" }));
}

function theme() {
  const root = document.documentElement, asked = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => { root.dataset.theme = name; };
  set(asked.matches ? "dark" : "light");
  asked.addEventListener("change", () => { set(asked.matches ? "dark" : "light"); redraw(); });
  document.getElementById("theme").addEventListener("click", () => { set(dark() ? "light" : "dark"); redraw(); });
}

theme();
filter();
summary();
const speeds = Object.keys(run.curves).filter((name) => /_per_second$|memory/.test(name));
curvesSection("curves", "Curves", Object.keys(run.curves).filter((name) => !speeds.includes(name)));
parametersSection();
heatSection();
parallelSection();
inferenceSection();
timelineSection();
curvesSection("throughput", "Throughput and memory", speeds);
tableSection();
failuresSection();
textsSection();
redraw();
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redraw, 150); });
