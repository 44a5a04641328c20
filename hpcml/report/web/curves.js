// Metrics over steps.

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, known = 0;
  return values.map((value) => {
    if (value === null) return null;
    // Without the bias towards the zero that it began with.
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

function curvesSection(id, heading, names) {
  if (!names.length) return;
  const chosen = { metric: names[0], x: false, y: false, smoothing: 0, cells: "10" };
  const holder = element("div"), legend = element("div", { class: "legend" }), note = element("p", { class: "note" });
  let cells = [];
  const change = (name) => (value) => { chosen[name] = value; draw(cells); };
  const amount = element("output", {}, "none");
  const slider = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => {
    amount.textContent = slider.value === "0" ? "none" : slider.value;
    change("smoothing")(Number(slider.value));
  } });
  const controls = element("div", { class: "controls" },
    choice("metric", names.map((name) => [name, name]), chosen.metric, change("metric")),
    choice("cells", [["10", "the best 10"], ["50", "the best 50"], ["all", "all that are shown"], ["picked", "those that are picked"]], chosen.cells, change("cells")),
    checkbox("log steps", false, change("x")), checkbox("log values", false, change("y")),
    element("label", {}, "smoothing", slider, amount));

  function draw(shown) {
    cells = shown;
    const curves = run.curves[chosen.metric];
    let with_ = shown.filter((cell) => curves[cell.index]).sort(bestFirst);
    const all = with_.length;
    if (chosen.cells === "picked") with_ = with_.filter((cell) => view.picked.has(cell.index));
    else if (chosen.cells !== "all") with_ = with_.filter((cell, place) => place < Number(chosen.cells) || view.picked.has(cell.index));
    const drawn = with_.map((cell) => ({ cell, steps: curves[cell.index].steps, values: smoothed(curves[cell.index].values, chosen.smoothing) }));
    const xs = [], ys = [];
    for (const curve of drawn) curve.steps.forEach((step, n) => {
      const value = curve.values[n];
      if (value !== null && (!chosen.x || step > 0) && (!chosen.y || value > 0)) xs.push(step), ys.push(value);
    });
    const place = axes(holder, {
      height: 360, label: `${chosen.metric} over steps of ${drawn.length} cells`, xLabel: "step", yLabel: chosen.metric,
      makeX: (range) => (chosen.x ? logarithmic : linear)(extent(xs), range), makeY: (range) => (chosen.y ? logarithmic : linear)(extent(ys), range),
    });
    const few = drawn.length <= PALETTE.length;
    place.plot.setAttribute("class", few ? "few" : "many");
    // The best ones are drawn over the others.
    drawn.map((curve, n) => [curve, few ? PALETTE[n] : shade(n / (drawn.length - 1))]).reverse().sort((a, b) => pickedLast(a[0].cell, b[0].cell)).forEach(([curve, colour]) => {
      let d = "", pen = "M";
      const points = [];
      curve.steps.forEach((step, n) => {
        const x = place.x(step), y = place.y(curve.values[n]);
        if (x === null || y === null) { pen = "M"; return; }
        d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
        pen = "L";
        points.push([x, y]);
      });
      const picked = view.picked.has(curve.cell.index) ? " picked" : "";
      place.plot.append(points.length === 1
        ? shape("circle", { class: `dot${picked}`, r: 4, cx: points[0][0], cy: points[0][1], fill: colour, "data-cell": curve.cell.index })
        : shape("path", { class: `curve${picked}`, d, stroke: colour, "data-cell": curve.cell.index }));
    });
    pointed(place.svg, (node) => node.dataset.cell && describe(byIndex.get(Number(node.dataset.cell))), (node) => node.dataset.cell && pick(Number(node.dataset.cell)));
    legend.replaceChildren(...(few
      ? drawn.map(({ cell }, n) => element("span", {}, element("i", { style: `background:${PALETTE[n]}` }), ` ${title(cell)}`))
      : drawn.length ? [element("span", {}, element("i", { style: `background:${shade(0)}` }), objective ? " the best" : " the first"), element("span", {}, element("i", { style: `background:${shade(1)}` }), objective ? " the worst that is drawn" : " the last that is drawn")] : []));
    const kept = run.curved < run.cells.filter((cell) => cell.attempts).length ? ` The report has the curves of ${run.curved} cells, the best ones.` : "";
    note.textContent = (drawn.length ? `${drawn.length} of ${all} curves.` : "No cell that is shown has this metric.") + kept;
  }
  section(id, heading, draw, controls, holder, legend, note);
}
