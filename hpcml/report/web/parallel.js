// Parallel coordinates: one axis for each swept parameter, and the metric.

function parallelSection() {
  if (run.swept.length < 2 || !metrics.length) return;
  const height = 330, top = 30, bottom = 22;
  const chosen = { metric: metrics[0] };
  const holder = element("div");
  let cells = [];
  const controls = element("div", { class: "controls" }, choice("metric", metrics.map((name) => [name, run.titles.metrics[name]]), chosen.metric, (value) => {
    view.ranges.delete(chosen.metric);
    chosen.metric = value;
    redraw();
  }));

  function draw(shown) {
    cells = shown;
    const names = [...run.swept.slice(0, 10), chosen.metric].filter((name, n, all) => all.indexOf(name) === n || n === all.length - 1);
    const width = Math.max(320, holder.clientWidth), gap = (width - 120) / (names.length - 1);
    const get = (cell, n) => (n === names.length - 1 ? cell.metrics[chosen.metric] : cell.params[names[n]]);
    const has = (cell) => names.every((_, n) => { const value = get(cell, n); return value !== undefined && value !== null; });
    // The axes are those of all cells, so that a range keeps its meaning.
    const all = run.cells.filter(has);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Parallel coordinates of ${names.join(", ")}` });
    const lines = shape("g", { class: shown.length > 200 ? "many crowd" : "many" });
    svg.append(lines);
    if (!all.length) return holder.replaceChildren(element("p", { class: "note" }, "No cell has this metric and all parameters."));
    const places = names.map((_, n) => parameterScale(all.map((cell) => get(cell, n)), [height - bottom, top], 0.02));
    const drawn = shown.filter(has).sort(bestFirst), [low, high] = extent(drawn.map((cell) => get(cell, names.length - 1)));
    const better = run.objective && run.objective[0] === chosen.metric && run.objective[1] === "max" ? (share) => 1 - share : (share) => share;
    for (const cell of [...drawn].reverse().sort(pickedLast)) {
      const d = "M" + names.map((_, n) => `${(60 + n * gap).toFixed(1)} ${places[n](get(cell, n))?.toFixed(1)}`).join("L");
      const share = high > low ? (get(cell, names.length - 1) - low) / (high - low) : 0;
      lines.append(shape("path", { class: view.picked.has(cell.index) ? "curve picked" : "curve", d, stroke: shade(better(share)), "data-cell": cell.index }));
    }
    names.forEach((name, n) => {
      const last = n === names.length - 1, x = 60 + n * gap, key = last ? `metric ${name}` : name, title = run.titles[last ? "metrics" : "params"][name];
      svg.append(shape("path", { class: "axis", d: `M${x} ${top}V${height - bottom}` }));
      svg.append(shape("text", { class: "name", x, y: 16, "text-anchor": "middle" }, title.length * 7.5 > gap ? title.slice(0, Math.max(3, Math.floor(gap / 7.5) - 1)) + "…" : title));
      for (const tick of places[n].ticks(6)) svg.append(shape("text", { class: "halo", x: x + 5, y: places[n](tick) + 4 }, places[n].format(tick)));
      const range = view.ranges.get(key);
      if (range) svg.append(shape("rect", { class: "brush", x: x - 9, width: 18, y: range.from, height: range.to - range.from }));
      svg.append(axisHandle(svg, x, top, height - bottom, (from, to) => {
        if (to - from < 4) view.ranges.delete(key);
        else view.ranges.set(key, { from, to, test: (cell) => { const at = has(cell) ? places[n](get(cell, n)) : null; return at !== null && at >= from && at <= to; } });
        redraw();
      }));
    });
    pointed(svg, (node) => node.dataset.cell && describe(byIndex.get(Number(node.dataset.cell))), (node) => node.dataset.cell && pick(Number(node.dataset.cell)));
    holder.replaceChildren(svg);
  }
  section("parallel", "Parallel coordinates", draw, controls, holder, element("p", { class: "note" }, "A line is a cell, in the colour of the metric. Drag along an axis to show the cells in that range only; click on it to show all again."));
}

// What takes the pointer over an axis; `done` gets the range that was dragged over.
function axisHandle(svg, x, top, bottom, done) {
  const at = (event) => Math.min(bottom, Math.max(top, event.clientY - svg.getBoundingClientRect().top));
  const handle = shape("rect", { class: "handle", x: x - 9, width: 18, y: top, height: bottom - top });
  let begin = null, mark = null;
  handle.addEventListener("pointerdown", (event) => {
    handle.setPointerCapture(event.pointerId);
    begin = at(event);
    mark = shape("rect", { class: "brush", x: x - 9, width: 18, y: begin, height: 0 });
    svg.append(mark);
  });
  handle.addEventListener("pointermove", (event) => {
    if (begin === null) return;
    mark.setAttribute("y", Math.min(begin, at(event)));
    mark.setAttribute("height", Math.abs(begin - at(event)));
  });
  handle.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const range = [begin, at(event)].sort((a, b) => a - b);
    begin = null;
    done(...range);
  });
  return handle;
}
