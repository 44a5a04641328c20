// A metric against each swept parameter.

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function parametersSection() {
  if (!run.swept.length || !metrics.length) return;
  const chosen = { metric: metrics[0], y: false };
  const grid = element("div", { class: "grid" });
  let cells = [];
  const change = (name) => (value) => { chosen[name] = value; draw(cells); };
  const controls = element("div", { class: "controls" }, choice("metric", metrics.map((name) => [name, run.titles.metrics[name]]), chosen.metric, change("metric")), checkbox("log values", false, change("y")));

  function draw(shown) {
    cells = shown;
    const known = shown.filter((cell) => typeof cell.metrics[chosen.metric] === "number" && (!chosen.y || cell.metrics[chosen.metric] > 0));
    const range = extent(known.map((cell) => cell.metrics[chosen.metric]));
    grid.replaceChildren();
    for (const name of run.swept) {
      const with_ = known.filter((cell) => name in cell.params);
      const holder = element("div");
      grid.append(holder);
      if (!with_.length) {
        holder.append(element("p", { class: "note" }, `${name}: no values`));
        continue;
      }
      const values = with_.map((cell) => cell.params[name]);
      const place = axes(holder, {
        height: 250, label: `${chosen.metric} against ${name}`, xLabel: name, yLabel: chosen.metric,
        makeX: (span) => parameterScale(values, span), makeY: (span) => (chosen.y ? logarithmic : linear)(range, [span[0] - 8, span[1] + 8]),
      });
      const groups = new Map();
      for (const cell of with_) {
        const key = text(cell.params[name]);
        groups.set(key, [...(groups.get(key) ?? []), cell.metrics[chosen.metric]]);
      }
      if (groups.size > 1 && groups.size <= with_.length / 2) {
        const points = [...new Map(with_.map((cell) => [text(cell.params[name]), cell.params[name]]))].map(([key, value]) => [place.x(value), place.y(median(groups.get(key)))]).sort((a, b) => a[0] - b[0]);
        place.plot.append(shape("path", { class: "median", d: "M" + points.map((point) => point.join(" ")).join("L") }));
      }
      for (const cell of with_) {
        place.plot.append(shape("circle", {
          class: view.picked.has(cell.index) ? "dot picked" : "dot", r: with_.length > 300 ? 2.5 : 4,
          cx: place.x(cell.params[name]), cy: place.y(cell.metrics[chosen.metric]), style: `fill:${ofState(cell.state)}`, "data-cell": cell.index,
        }));
      }
      pointed(place.svg, (node) => node.dataset.cell && describe(byIndex.get(Number(node.dataset.cell))), (node) => node.dataset.cell && pick(Number(node.dataset.cell)));
    }
  }
  section("parameters", "Parameters", draw, controls, grid, element("p", { class: "note" }, "A point is a cell, in the colour of its state. The broken line joins the medians."));
}
