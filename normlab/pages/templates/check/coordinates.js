"use strict";
// The plots of a coordinate check: exponents of every module, and values over width and depth.
(() => {
  const { data, schemes, hidden, style, css, text, brief, narrow, faded, chosen, rate, axis, plot } = NormLab;
  const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
  const digits = (value) => (value >= 1e-2 && value < 1e4 ? String(Number(value.toPrecision(3))) : rate(value));
  const TITLES = { width: "Width", depth: "Blocks" };
  const KINDS = [
    { name: "start", symbol: "diamond-open", words: "size at the start", shift: -0.24 },
    { name: "first", symbol: "circle-open", words: "change in the first step", shift: 0 },
    { name: "last", symbol: "circle", words: `change in ${data.steps} steps`, shift: 0.24 },
  ].filter((kind) => data.steps > 1 || kind.name !== "last");

  const forest = (found) => () => {
    const rows = found.trends;
    const trace = (kind) => {
      const known = rows.map((row, i) => ({ row, i, fit: row.fits[kind.name] })).filter(({ fit }) => fit);
      const ink = known.map(({ row }) => (kind.name === "start" ? css("--muted") : row.fine ? css("--series-0") : css("--bad")));
      const half = known.map(({ fit }) => (fit[1] === null ? 0 : (fit[2] - fit[1]) / 2));
      // One trace for each colour: error bars of a trace have one colour.
      return [...new Set(ink)].map((colour) => {
        const own = known.map((_, k) => k).filter((k) => ink[k] === colour);
        return {
          x: own.map((k) => known[k].fit[0]), y: own.map((k) => known[k].i + kind.shift), mode: "markers",
          marker: { symbol: kind.symbol, size: 8, color: colour, line: { width: 1.8, color: colour } },
          error_x: { type: "data", array: own.map((k) => half[k]), thickness: 1.6, width: 3, color: colour },
          text: own.map((k) => `${text(schemes[known[k].row.scheme].label)}<br>${kind.words}: ${signed(known[k].fit[0])} ± ${half[k].toFixed(2)}`),
          hovertemplate: "%{text}<extra></extra>", meta: { part: kind.name },
        };
      });
    };
    const traces = KINDS.flatMap(trace);
    const reach = traces.flatMap((one) => one.x.flatMap((x, k) => [x - one.error_x.array[k], x + one.error_x.array[k]]));
    const range = [Math.min(-2.4 * data.threshold, ...reach) - 0.05, Math.max(2.4 * data.threshold, ...reach) + 0.05];
    return {
      traces,
      layout: {
        shapes: [
          { type: "rect", yref: "paper", y0: 0, y1: 1, x0: -data.threshold, x1: data.threshold, line: { width: 0 }, layer: "below", fillcolor: faded(css("--good"), 0.13) },
          { type: "line", yref: "paper", y0: 0, y1: 1, x0: 0, x1: 0, line: { color: css("--muted"), width: 1 } },
        ],
        xaxis: axis(`p over ${found.name}`, { range, nticks: narrow() ? 5 : 8 }),
        yaxis: axis("", {
          range: [rows.length - 0.4, -0.6], tickvals: rows.map((_, i) => i), showgrid: false,
          ticktext: rows.map((row) => brief(schemes[row.scheme].label, narrow() ? 21 : 30)), tickfont: { size: narrow() ? 10 : 12 },
        }),
        margin: { l: 20, r: 8, t: 8, b: 44 },
      },
    };
  };
  data.axes.forEach((found) => plot(`plot-exponents-${found.name}`, forest(found)));

  const slider = document.getElementById("value-step");
  const view = () => {
    const what = chosen("value-what");
    // There is no change before the first step.
    const step = Math.max(Number(slider.value), what === "change" ? 1 : 0);
    return { what, step, at: what === "change" ? step - 1 : step };
  };
  const values = (found) => () => {
    const { what, step, at } = view();
    const traces = found.trends.filter((row) => !hidden.has(row.scheme)).map((row) => {
      const look = style(row.scheme);
      const points = row[what][at].map(([y, low, high], k) => ({ x: found.sizes[k], y, low, high })).filter((point) => point.y !== null);
      return {
        x: points.map((p) => p.x), y: points.map((p) => p.y), mode: "lines+markers",
        line: { color: look.colour, width: 2, dash: look.dash }, marker: { color: look.colour, symbol: look.symbol, size: 8 },
        error_y: {
          type: "data", symmetric: false, array: points.map((p) => p.high - p.y), arrayminus: points.map((p) => p.y - p.low),
          thickness: 1.3, width: 3, color: look.colour,
        },
        meta: { scheme: row.scheme, part: what },
        hovertemplate: `${text(schemes[row.scheme].label)}, ${found.name} %{x}: %{y:.3g}<extra></extra>`,
      };
    });
    const all = traces.flatMap((trace) => trace.y).filter((y) => y > 0).map(Math.log10);
    const powers = all.length ? Array.from({ length: Math.ceil(Math.max(...all)) - Math.floor(Math.min(...all)) + 1 }, (_, i) => Math.floor(Math.min(...all)) + i) : [0];
    const steps = powers.length < 3 ? [1, 2, 5] : powers.length < 5 ? [1, 3] : [1];
    const ticks = powers.flatMap((power) => steps.map((one) => Number(`${one}e${power}`)));
    const title = what === "change" ? `RMS of the change, step ${step}` : `RMS, step ${step}`;
    return {
      traces,
      layout: {
        xaxis: axis(TITLES[found.name], { type: "log", tickvals: found.sizes, ticktext: found.sizes.map(String) }),
        yaxis: axis(title, { type: "log", tickvals: ticks, ticktext: ticks.map(digits) }),
      },
    };
  };
  const drawn = data.axes.map((found) => plot(`plot-values-${found.name}`, values(found)));
  document.querySelectorAll("#values input").forEach((input) => input.addEventListener("input", () => {
    document.getElementById("value-step-shown").textContent = view().step;
    drawn.forEach((draw) => draw());
  }));
})();
