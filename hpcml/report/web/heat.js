// A metric over two parameters.

function heatSection() {
  if (run.swept.length < 2 || !metrics.length) return;
  const chosen = { metric: metrics[0], x: run.swept[0], y: run.swept[1] };
  const holder = element("div"), note = element("p", { class: "note" });
  let cells = [];
  const change = (name) => (value) => { chosen[name] = value; draw(cells); };
  const names = run.swept.map((name) => [name, name]);
  const controls = element("div", { class: "controls" }, choice("metric", metrics.map((name) => [name, run.titles.metrics[name]]), chosen.metric, change("metric")), choice("across", names, chosen.x, change("x")), choice("up", names, chosen.y, change("y")));
  const most = 24;

  // The values of a parameter in their order; of very many numbers, ranges that hold as many cells each.
  function groups(values) {
    const numeric = values.every((value) => typeof value === "number");
    const distinct = [...new Map(values.map((value) => [text(value), value])).values()].sort((a, b) => (numeric ? a - b : text(a) < text(b) ? -1 : 1));
    if (distinct.length <= most || !numeric) return { labels: distinct.slice(0, most).map(brief), find: (value) => distinct.findIndex((other) => text(other) === text(value)), left: Math.max(0, distinct.length - most) };
    const sorted = [...values].sort((a, b) => a - b), count = 10;
    const edges = [...new Set(Array.from({ length: count }, (_, n) => sorted[Math.floor((n * sorted.length) / count)]))];
    return { labels: edges.map((edge) => `≥ ${number(edge)}`), find: (value) => edges.findLastIndex((edge) => value >= edge), left: 0 };
  }

  function draw(shown) {
    cells = shown;
    const known = shown.filter((cell) => typeof cell.metrics[chosen.metric] === "number" && chosen.x in cell.params && chosen.y in cell.params);
    const [across, up] = [chosen.x, chosen.y].map((name) => groups(known.map((cell) => cell.params[name])));
    const boxes = new Map();
    for (const cell of known) {
      const column = across.find(cell.params[chosen.x]), row = up.find(cell.params[chosen.y]);
      if (column < 0 || row < 0 || column >= across.labels.length || row >= up.labels.length) continue;
      const key = `${column} ${row}`;
      boxes.set(key, [...(boxes.get(key) ?? []), cell.metrics[chosen.metric]]);
    }
    if (!boxes.size) return holder.replaceChildren(element("p", { class: "note" }, "No cell that is shown has a value here.")), (note.textContent = "");
    const means = new Map([...boxes].map(([key, values]) => [key, values.reduce((sum, value) => sum + value, 0) / values.length]));
    const [low, high] = extent(means.values());
    const rows = up.labels.length, height = Math.min(520, 60 + rows * 34);
    const place = axes(holder, {
      height, left: 110, label: `${chosen.metric} by ${chosen.x} and ${chosen.y}`, xLabel: chosen.x, yLabel: chosen.y,
      makeX: (range) => categories(across.labels, range), makeY: (range) => categories(up.labels, range),
    });
    const wide = place.x.width - 2, tall = place.y.width - 2;
    for (const [key, mean] of means) {
      const [column, row] = key.split(" ").map(Number), x = place.x(across.labels[column]), y = place.y(up.labels[row]);
      const share = high > low ? (mean - low) / (high - low) : 0.5, colour = shade(share), [r, g, b] = colour.match(/\d+/g).map(Number);
      const said = `${chosen.x} ${across.labels[column]}, ${chosen.y} ${up.labels[row]}\n${chosen.metric} ${number(mean)}, the mean of ${boxes.get(key).length}`;
      place.plot.append(shape("rect", { class: "box", x: x - wide / 2, y: y - tall / 2, width: wide, height: tall, fill: colour, "data-said": said }));
      if (wide > 50 && tall > 14) place.plot.append(shape("text", { x, y: y + 4, "text-anchor": "middle", style: `pointer-events:none;fill:${r * 0.3 + g * 0.59 + b * 0.11 > 130 ? "#000" : "#fff"}` }, number(mean)));
    }
    pointed(place.svg, (node) => node.dataset.said);
    const left = across.left + up.left ? ` ${across.left + up.left} values have no room.` : "";
    note.textContent = `The mean over all other parameters, from ${number(low)} (dark) to ${number(high)} (bright).${left}`;
  }
  section("heat", "Two parameters", draw, controls, holder, note);
}
