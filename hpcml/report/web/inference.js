// The answers of an inference.

function inferenceSection() {
  for (const inference of run.inferences) {
    const { proof } = inference, parts = [], draws = [];
    if (proof) {
      const tile = (value, name) => element("div", { class: "tile" }, element("b", {}, value.toLocaleString("en")), element("span", {}, name));
      parts.push(element("div", { class: "tiles" }, tile(proof.rows_out, `rows of ${proof.rows_in.toLocaleString("en")}, each once`), tile(proof.answered, "answered"), tile(proof.failed, "failed"), tile(proof.prompt_tokens, "tokens of prompts"), tile(proof.output_tokens, "tokens of answers")));
    } else parts.push(element("p", { class: "note" }, "Its answers are not merged yet."));
    if (inference.speed.length) {
      const holder = element("div"), begin = inference.speed[0][0];
      parts.push(element("h3", {}, "Tokens of answers per second"), holder);
      draws.push(() => {
        const times = inference.speed.map(([time]) => time - begin), values = inference.speed.map(([, tokens]) => tokens);
        const place = axes(holder, {
          height: 240, label: "Tokens of answers per second over time", xLabel: "time since the first answers", yLabel: "tokens per second",
          makeX: (range) => elapsed([0, Math.max(1, times.at(-1))], range), makeY: (range) => linear([0, extent(values)[1] || 1], range),
        });
        // A line through one point is none.
        if (times.length === 1) place.plot.append(shape("circle", { class: "dot", r: 5, cx: place.x(0), cy: place.y(values[0]), fill: PALETTE[0] }));
        else place.plot.append(shape("path", { class: "curve", stroke: PALETTE[0], d: "M" + times.map((time, n) => `${place.x(time).toFixed(1)} ${place.y(values[n]).toFixed(1)}`).join("L") }));
      });
    }
    const lengths = Object.entries(proof?.output_lengths ?? {});
    if (lengths.length) {
      const holder = element("div");
      parts.push(element("h3", {}, "Tokens of an answer"), holder);
      draws.push(() => {
        const most = Math.max(...lengths.map(([, count]) => count));
        const place = axes(holder, {
          height: 220, label: "How many answers have which length", xLabel: "tokens, at most", yLabel: "answers",
          makeX: (range) => categories(lengths.map(([length]) => length), range), makeY: (range) => linear([0, most], range),
        });
        for (const [length, count] of lengths) {
          const wide = place.x.width * 0.8, top = place.y(count);
          place.plot.append(shape("rect", { class: "length", x: place.x(length) - wide / 2, width: wide, y: top, height: place.y(0) - top, fill: PALETTE[0], "data-said": `up to ${length} tokens: ${count} answers` }));
        }
        pointed(place.svg, (node) => node.dataset.said);
      });
    }
    const errors = Object.entries(proof?.errors ?? {});
    if (errors.length) parts.push(element("h3", {}, "Why rows failed"), element("table", { class: "errors" }, element("tbody", {}, ...errors.map(([cause, count]) => element("tr", {}, element("td", { class: "number" }, String(count)), element("td", {}, cause))))));
    if (inference.samples.length) parts.push(element("h3", {}, "The first answers"), element("div", { class: "scroll", tabindex: 0 }, element("table", { class: "samples" }, element("tbody", {}, ...inference.samples.map((sample) => element("tr", {}, element("td", {}, sample.key), element("td", { class: sample.failed ? "failed" : "answer" }, sample.text)))))));
    const heading = run.inferences.length > 1 ? `Answers of ${title(byIndex.get(inference.cell))}` : "Answers";
    const node = section(`answers-${inference.cell}`, heading, (cells) => {
      node.hidden = !cells.some((cell) => cell.index === inference.cell);
      if (!node.hidden) for (const draw of draws) draw();
    }, ...parts);
  }
}
