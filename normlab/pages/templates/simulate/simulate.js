"use strict";
// The observables of a simulation over time, with the laws over them and a cursor at the time that the spheres show.
(() => {
  const { data, schemes, hidden, style, css, text, faded, chosen, axis, plot } = NormLab;
  const runs = data.runs;
  const several = runs.length > 1;
  const owner = (k) => (several ? `${text(schemes[k].label)}, ` : "");
  const shown = () => runs.map((run, k) => [run, k]).filter(([, k]) => !hidden.has(k));
  const known = (values) => values.filter((value) => value !== null && Number.isFinite(value));

  const timeType = () => {
    const wish = chosen("time-scale") ?? "auto";
    return wish === "auto" ? (data.clock === "log" ? "log" : "linear") : wish;
  };
  // What falls exponentially asks for a logarithm, once it has fallen.
  const valueType = (panel, values) => {
    const wish = chosen("value-scale") ?? "auto";
    const usable = values.filter((value) => value > 0);
    const falls = panel.log && Math.max(...usable) > 5 * Math.min(...usable);
    return wish === "auto" ? (falls ? "log" : "linear") : wish;
  };
  const line = (run, k, panel) => ({
    x: run.times, y: run.bands[panel.name].mean, mode: "lines", line: { color: style(k).colour, dash: style(k).dash, width: 2.2 },
    meta: { scheme: k, part: "simulated" }, hovertemplate: `${owner(k)}layer %{x:.4g}: %{y:.4g}<extra></extra>`,
  });
  const spread = (run, k, panel) => {
    const { low, high } = run.bands[panel.name];
    if (!low) return [];
    return [{
      x: [...run.times, ...[...run.times].reverse()], y: [...high, ...[...low].reverse()], mode: "lines", line: { width: 0 },
      fill: "toself", fillcolor: faded(style(k).colour, 0.16), hoverinfo: "skip", meta: { scheme: k, part: "seeds" },
    }];
  };
  const laws = (run, k, panel) => run.laws.filter((law) => law.observable === panel.name).flatMap((law) => [
    ["fitted", "dash", "fitted law"], ["predicted", "dot", "slope that theory predicts"],
  ].filter(([part]) => law[part].length).map(([part, dash, words]) => ({
    x: law.times, y: law[part], mode: "lines", line: { color: css("--ink"), dash, width: part === "fitted" ? 2 : 2.6 },
    meta: { scheme: k, part }, hovertemplate: `${owner(k)}${words}: %{y:.4g}<extra></extra>`,
  })));
  // 1, 2, 5 within a few decades, else whole powers.
  const decades = (values) => {
    const span = Math.log10(Math.max(...values) / Math.min(...values));
    return span < 0.7 ? { nticks: 5 } : { dtick: span < 2.5 ? "D2" : Math.ceil(span / 6) };
  };
  const panelPlot = (panel) => () => {
    const traces = shown().flatMap(([run, k]) => [...spread(run, k, panel), line(run, k, panel)]);
    traces.push(...shown().flatMap(([run, k]) => laws(run, k, panel)));
    const all = known(traces.flatMap((trace) => trace.y));
    const type = valueType(panel, all);
    const values = all.filter((value) => type === "linear" || value > 0);
    // A constant must not look like noise: its last digits are the number format's.
    const flat = type === "linear" && values.length && Math.max(...values) - Math.min(...values) < 1e-4 * Math.max(...values.map(Math.abs));
    const range = flat ? { range: [values[0] - 0.5 * Math.abs(values[0]) - 0.01, values[0] + 0.5 * Math.abs(values[0]) + 0.01] } : {};
    return {
      traces,
      layout: {
        uirevision: [timeType(), type].join(), margin: { l: 48, r: 10, t: 8, b: 40 },
        xaxis: axis("Layer", { type: timeType(), nticks: 7, exponentformat: "power" }),
        yaxis: axis("", { type, exponentformat: "power", ...(type === "log" ? decades(values) : { nticks: 6 }), ...range }),
      },
    };
  };
  const draws = data.panels.map((panel) => plot(`plot-${panel.name}`, panelPlot(panel)));

  const picked = () => Number(document.getElementById("histogram-run")?.value ?? 0);
  const histogram = () => {
    const run = runs[picked()];
    const bins = run.histogram[0].length;
    const z = Array.from({ length: bins }, (_, bin) => run.histogram.map((look) => Math.sqrt(look[bin] ?? 0)));
    return {
      traces: [{
        type: "heatmap", x: run.times, y: Array.from({ length: bins }, (_, bin) => -1 + (2 * bin + 1) / bins), z, zmin: 0,
        customdata: z.map((row) => row.map((value) => 100 * value * value)), showscale: false,
        colorscale: [[0, css("--surface")], [0.5, faded(style(picked()).colour, 0.65)], [1, style(picked()).colour]],
        hovertemplate: "layer %{x:.4g}, cosine %{y:.2f}: %{customdata:.2f} % of pairs<extra></extra>", meta: { part: "histogram" },
      }],
      layout: {
        xaxis: axis("Layer", { type: timeType(), exponentformat: "power" }), yaxis: axis("Cosine of two tokens (1: alike)", { range: [-1, 1] }),
      },
    };
  };
  if (runs.every((run) => run.histogram.length)) {
    draws.push(plot("plot-histogram", histogram));
    document.getElementById("histogram-run")?.addEventListener("change", () => draws.at(-1)());
  }
  document.querySelectorAll("input[name=time-scale], input[name=value-scale]").forEach((input) => {
    input.addEventListener("change", () => draws.forEach((draw) => draw()));
  });

  // The cursor is an element over the plot: moving it redraws nothing.
  document.querySelectorAll(".watched").forEach((box) => {
    const element = document.getElementById(box.dataset.plot);
    const cursor = box.querySelector(".cursor");
    const move = (time) => {
      const full = element._fullLayout;
      if (!full?.xaxis?.d2p) return;
      const along = full.xaxis.d2p(time);
      const inside = Number.isFinite(along) && along >= -0.5 && along <= full.xaxis._length + 0.5;
      cursor.style.display = inside ? "block" : "none";
      Object.assign(cursor.style, { left: `${full.xaxis._offset + along}px`, top: `${element.offsetTop + full.yaxis._offset}px`, height: `${full.yaxis._length}px` });
    };
    Stage.onMove(move);
    if (document.querySelector(".sphere")) element.on("plotly_afterplot", () => move(Stage.time()));
    element.on("plotly_click", (event) => Stage.seek(Number(event.points[0].x)));
  });
  // Plots inside closed details have no size until they open.
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => {
    details.querySelectorAll(".plot").forEach((element) => Plotly.Plots.resize(element));
  }));
})();
