// When cells waited, ran and saved.

const CAUSES = { done: "done", rung: "done", "": "running", stopped: "stopped", lost: "lost" };

function timelineSection() {
  if (!run.attempts.length) return;
  const left = 120;
  let row = 18;
  const begin = Math.min(...run.attempts.map((attempt) => attempt.queued ?? attempt.started));
  let end = begin + 1;
  for (const attempt of run.attempts) end = Math.max(end, attempt.ended ?? run.made);
  const svg = shape("svg", { role: "img", "aria-label": "Attempts over time", style: "position:sticky;top:0" });
  const space = element("div");
  const box = element("div", { class: "scroll", tabindex: 0, style: "max-height:420px", onscroll: () => paint() }, space);
  space.append(svg);
  let rows = [];

  function draw(cells) {
    const shown = new Set(cells.map((cell) => cell.index)), found = new Map();
    for (const attempt of run.attempts) {
      if (!shown.has(attempt.cell)) continue;
      const key = attempt.worker === null ? `cell ${attempt.cell}` : `cell ${attempt.cell}, worker ${attempt.worker}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(attempt);
    }
    rows = [...found].sort((a, b) => a[1][0].started - b[1][0].started);
    paint();
  }

  // Only the rows that can be seen are there.
  function paint() {
    const width = Math.max(320, box.clientWidth - 2), head = 26, height = Math.min(416, head + rows.length * row + 4);
    space.style.height = `${head + rows.length * row + 4}px`;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const x = elapsed([0, end - begin], [left, width - 24]);
    const first = Math.max(0, Math.floor(box.scrollTop / row)), count = Math.ceil((height - head) / row);
    const parts = [];
    let lines = "";
    for (const tick of x.ticks(Math.floor(width / 120))) {
      lines += `M${x(tick)} ${head - 6}V${height}`;
      parts.push(shape("text", { x: x(tick), y: 14, "text-anchor": "middle" }, x.format(tick)));
    }
    parts.push(shape("path", { class: "lines", d: lines }));
    const block = (attempt, kind, from, to, top, high, said) => shape("rect", {
      class: kind, x: x(from - begin), y: top, width: Math.max(1.5, x(to - begin) - x(from - begin)), height: high, "data-said": said,
    });
    rows.slice(first, first + count).forEach(([key, attempts], n) => {
      const top = head + n * row, cell = byIndex.get(attempts[0].cell), high = Math.max(3, row - 5);
      if (row > 12) parts.push(shape("text", { x: left - 8, y: top + 12, "text-anchor": "end", class: "name", "data-said": describe(cell) }, key));
      for (const attempt of attempts) {
        const until = attempt.ended ?? run.made, cause = CAUSES[attempt.cause] ?? "failed";
        const said = [`${key}, attempt ${attempt.number} on ${attempt.host}`, moment(attempt.started), `${duration(until - attempt.started)}: ${attempt.reason || attempt.cause || "running"}`].join("\n");
        if (attempt.queued !== null) parts.push(block(attempt, "waiting", attempt.queued, attempt.started, top + high / 2, Math.min(4, high - 1), `${key} waited ${duration(attempt.started - attempt.queued)}`));
        const bar = block(attempt, "ran", attempt.started, until, top + 2, high, said);
        bar.setAttribute("style", `fill:${ofState(cause)}`);
        parts.push(bar);
        if (attempt.asked !== null) parts.push(block(attempt, "asked", attempt.asked, until, top + 2, high, `${said}\nasked to stop ${duration(until - attempt.asked)} before its end`));
        for (const [from, to] of attempt.saved) parts.push(block(attempt, "saved", from, to, top + 2 + high / 4, high / 2, `${key} saved a checkpoint in ${number(to - from)} s`));
      }
    });
    svg.replaceChildren(...parts);
  }
  pointed(svg, (node) => node.dataset.said);
  const legend = element("div", { class: "legend" }, ...[["waiting", "var(--pending)"], ["running", ofState("running")], ["done", ofState("done")], ["stopped or preempted, continues later", ofState("stopped")], ["failed", ofState("failed")], ["lost", ofState("lost")], ["saving", "var(--saving)"]].map(([name, colour]) => element("span", {}, element("i", { style: `background:${colour}` }), ` ${name}`)),
    element("span", {}, element("i", { class: "asked" }), " asked to stop"));
  const low = checkbox("low rows", false, (on) => { row = on ? 4 : 18; box.scrollTop = 0; paint(); });
  section("timeline", "Timeline", draw, element("div", { class: "controls" }, legend, low), box, element("p", { class: "note" }, `From ${moment(begin)} on. A bar is an attempt, in the colour of its end; the thin line before it is the time in the queue.`));
}
