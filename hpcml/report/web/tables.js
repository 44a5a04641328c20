// The cells as a table, the failures, and the texts.

function tableSection() {
  const columns = [
    ["rank", (cell) => cell.rank], ["cell", (cell) => cell.index], ["state", (cell) => cell.state],
    ...run.swept.map((name) => [run.titles.params[name], (cell) => cell.params[name]]),
    ...metrics.slice(0, 12).map((name) => [run.titles.metrics[name], (cell) => cell.metrics[name]]),
    ["attempts", (cell) => cell.attempts], ["step", (cell) => cell.step],
    ["time", (cell) => (cell.started ? (cell.ended ?? run.made) - cell.started : null)], ["reason", (cell) => cell.reason],
  ];
  const order = { by: 0, sign: 1 };
  let most = 50, cells = [];
  const head = element("tr", {}, element("th", {}, "pick"), ...columns.map(([name], place) => element("th", { scope: "col" }, element("button", { type: "button", onclick: () => {
    order.sign = order.by === place ? -order.sign : 1;
    order.by = place;
    draw(cells);
  } }, name))));
  const body = element("tbody");
  const more = element("button", { type: "button", onclick: () => { most += 200; draw(cells); } }, "show more");

  function draw(shown) {
    cells = shown;
    const get = columns[order.by][1];
    const missing = (value) => value === null || value === undefined || value === "";
    const sorted = [...shown].sort((a, b) => {
      const [one, other] = [get(a), get(b)];
      if (missing(one) || missing(other)) return missing(one) - missing(other) || a.index - b.index;
      return order.sign * (one < other ? -1 : one > other ? 1 : 0) || a.index - b.index;
    });
    [...head.children].forEach((th, place) => th.setAttribute("aria-sort", place - 1 !== order.by ? "none" : order.sign > 0 ? "ascending" : "descending"));
    body.replaceChildren(...sorted.slice(0, most).map((cell) => {
      const box = element("input", { type: "checkbox", "aria-label": `pick cell ${cell.index}`, checked: view.picked.has(cell.index), onchange: () => pick(cell.index) });
      return element("tr", { class: view.picked.has(cell.index) ? "picked" : null }, element("td", {}, box), ...columns.map(([name, value]) => {
        const found = value(cell);
        if (name === "state") return element("td", {}, element("span", { class: "state", style: `--of:${ofState(found)}` }, found));
        if (name === "time") return element("td", { class: "number" }, duration(found));
        if (name === "reason") return element("td", { class: "reason", title: found }, found);
        if (typeof found === "number") return element("td", { class: "number" }, number(found));
        return element("td", {}, found === undefined || found === null ? "" : text(found));
      }));
    }));
    more.hidden = sorted.length <= most;
  }
  section("cells", "Cells", draw, element("p", { class: "note" }, "A cell that is picked stands out in all plots."), element("div", { class: "scroll", tabindex: 0 }, element("table", {}, element("thead", {}, head), body)), more);
}

function failuresSection() {
  if (!run.failed) return;
  const list = element("div");
  const one = (failure) => element("details", {},
    element("summary", {}, element("span", { class: "state", style: `--of:${ofState(failure.state)}` }, `${title(byIndex.get(failure.cell))} ${failure.state}`)),
    element("p", { class: "note" }, failure.log ? `The last lines of ${failure.log}` : "It wrote nothing."),
    ...(failure.log ? [element("pre", { tabindex: 0 }, failure.lines)] : []));

  function draw(cells) {
    const shown = new Set(cells.map((cell) => cell.index)), reasons = new Map();
    for (const failure of run.failures.filter((failure) => shown.has(failure.cell))) reasons.set(failure.reason, [...(reasons.get(failure.reason) ?? []), failure]);
    list.replaceChildren(...[...reasons].sort((a, b) => b[1].length - a[1].length).map(([reason, failures]) => element("details", { open: reasons.size === 1 || failures.length === 1 },
      element("summary", {}, `${failures.length === 1 ? "1 cell" : `${failures.length} cells`}: ${reason || "no reason is known"}`),
      element("div", { class: "inner" }, ...failures.map(one)))));
  }
  const note = run.failed > run.failures.length ? `The first ${run.failures.length} of ${run.failed}.` : "";
  section("failures", `Failures (${run.failed})`, draw, list, element("p", { class: "note" }, note));
}

function textsSection() {
  section("texts", "Recipe and site", null, ...[["recipe.yaml", run.recipe], ["site.yaml", run.site]].map(([name, content]) => element("details", {}, element("summary", {}, name), element("pre", { tabindex: 0 }, content))));
}
