"use strict";
// The plots of a check, or of two side by side, drawn from the data in the page.
(() => {
  const { data, schemes, hidden, colour, css, text, narrow, faded, chosen, rate, axis, plot } = NormLab;
  const checks = data.checks;
  const shown = () => checks.filter((check) => !hidden.has(check.scheme));
  const control = (id) => document.getElementById(id);
  const several = checks.length > 1;
  const name = (check) => text(schemes[check.scheme].label);
  const owner = (check) => (several ? `${name(check)}, ` : "");
  const known = (values) => values.filter((value) => value !== null && Number.isFinite(value));
  const digits = (value) => (Math.abs(value) >= 1e-2 && Math.abs(value) < 1e4 ? String(Number(value.toPrecision(3))) : rate(value));
  const WHEN = { before: { dash: "dot", width: 2, symbol: "circle-open", words: "before training" },
                 after: { dash: "solid", width: 2.6, symbol: "circle", words: "after training" } };

  // 1, 2, 5 in a decade, or whole powers where there are many; plotly's own choice within less than a decade.
  const logTicks = (values) => {
    const usable = known(values).filter((value) => value > 0);
    if (!usable.length) return {};
    const [low, high] = [Math.min(...usable), Math.max(...usable)].map(Math.log10);
    if (high - low < 0.8) return { nticks: 5 };
    const every = Math.ceil((high - low) / 8);
    const steps = high - low < 2.5 ? [1, 2, 5] : [1];
    const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 3 }, (_, i) => Math.floor(low) - 1 + i);
    const ticks = powers.filter((power) => power % every === 0).flatMap((power) => steps.map((step) => Number(`${step}e${power}`)));
    return { tickvals: ticks, ticktext: ticks.map((value) => (value >= 1e-2 && value < 1e4 ? String(value) : rate(value))) };
  };
  const rule = (y, more) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: css("--bad"), width: 1 }, opacity: 0.7, ...more,
  });
  // A block lies between two boundaries: neighbours make one band.
  const bands = (layers) => {
    const runs = [];
    layers.forEach((layer) => {
      if (runs.length && runs[runs.length - 1][1] === layer) runs[runs.length - 1][1] = layer + 1;
      else runs.push([layer, layer + 1]);
    });
    return runs;
  };

  const view = () => ({
    depth: Number(control("profile-depth")?.value ?? Math.max(...checks.flatMap((check) => check.depths))),
    when: chosen("profile-when") ?? "both",
    scale: chosen("profile-scale"),
  });
  const looks = (check, { depth, when }) => check.profiles.filter(
    (profile) => profile.depth === depth && (when === "both" || profile.when === when),
  );
  const places = (panel, values) => values.map((_, i) => (panel.boundary ? i : i + 0.5));
  const curve = (check, panel, profile, only) => {
    const values = profile.mean[panel.name];
    const look = WHEN[only ? "after" : profile.when];
    return {
      x: places(panel, values), y: values, mode: values.length > 30 ? "lines" : "lines+markers", connectgaps: false,
      line: { color: colour(check.scheme), width: look.width, dash: look.dash },
      marker: { color: colour(check.scheme), symbol: look.symbol, size: 5 }, opacity: look.dash === "dot" ? 0.85 : 1,
      customdata: values.map((_, i) => (panel.boundary ? `after ${i} blocks` : `block ${i}`)),
      meta: { scheme: check.scheme, part: profile.when },
      hovertemplate: `${owner(check)}step ${profile.step}, %{customdata}: %{y:.4g}<extra></extra>`,
    };
  };
  const spread = (check, panel, profile) => {
    const [low, high] = profile.spread[panel.name];
    const inside = low.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null);
    const back = [...inside].reverse();
    const at = (i) => (panel.boundary ? i : i + 0.5);
    return {
      x: [...inside, ...back].map(at), y: [...inside.map((i) => high[i]), ...back.map((i) => low[i])], mode: "lines",
      line: { width: 0 }, fill: "toself", fillcolor: faded(colour(check.scheme), 0.16), hoverinfo: "skip",
      meta: { scheme: check.scheme, part: "seeds" },
    };
  };
  // Drawn over the state's size alone, and only for the stack that theory looked at.
  const bounds = (check, { depth, when }) => {
    const theory = check.theory;
    if (!theory || theory.depth !== depth) return [];
    const moment = when === "before" || !theory.after ? "before" : "after";
    const proven = theory[moment]?.certificate ?? [];
    const traces = [];
    const line = (y, dash, ink, part, words) => traces.push({
      x: y.map((_, i) => i), y, mode: "lines", line: { color: ink, width: 2, dash }, meta: { scheme: check.scheme, part },
      hovertemplate: `${owner(check)}${words} after %{x} blocks: %{y:.4g}<extra></extra>`,
    });
    if (known(proven).length) line(proven, "dash", several ? colour(check.scheme) : css("--bad"), "bound", `proven bound, ${WHEN[moment].words},`);
    if (known(theory.predicted).length && when !== "after") line(theory.predicted, "dot", several ? colour(check.scheme) : css("--good"), "law", "law at initialisation");
    return traces;
  };
  // The axis of a panel and the thresholds on it; one that is far from every curve would only flatten them.
  const scaled = (panel, wish, values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const steep = panel.log || (low > 0 && high > 100 * low);
    const type = wish === "auto" ? (steep ? "log" : "linear") : wish;
    const whole = type === "linear" && panel.span && low > panel.span[0] - 0.05 && high < panel.span[1] + 0.05;
    const range = whole ? [panel.span[0] - 0.03, panel.span[1] + 0.05] : undefined;
    const near = (limit) => (type === "log" ? limit < 10 * high && 10 * limit > low : limit < 2 * high - low && limit > 2 * low - high);
    return { axis: { type, range, ...(type === "log" ? logTicks(values) : { nticks: 6 }) }, limits: panel.limits.filter((limit) => whole || near(limit)) };
  };
  const panelPlot = (panel) => () => {
    const now = view();
    const traces = [], shapes = [];
    shown().forEach((check) => {
      const found = looks(check, now);
      found.forEach((profile) => {
        if (profile.spread[panel.name]) traces.push(spread(check, panel, profile));
        traces.push(curve(check, panel, profile, checks.every((each) => each.profiles.every((p) => p.when === "before"))));
      });
      if (panel.name === "rms") traces.unshift(...bounds(check, now));
      const guilty = check.guilty[panel.name];
      bands(guilty?.depth === now.depth ? guilty.blocks : []).forEach(([x0, x1]) => shapes.push({
        type: "rect", yref: "paper", y0: 0, y1: 1, x0, x1, line: { width: 0 }, layer: "below",
        fillcolor: faded(several ? colour(check.scheme) : css("--bad"), 0.14),
      }));
    });
    const scale = scaled(panel, now.scale, known(traces.flatMap((trace) => trace.y)));
    return {
      traces,
      layout: {
        shapes: [...shapes, ...scale.limits.map((limit) => rule(limit))], uirevision: [now.depth, now.when, now.scale].join(),
        xaxis: axis("Block", { range: [-0.02 * now.depth, 1.02 * now.depth] }),
        yaxis: axis(panel.title, scale.axis),
        margin: { l: 44, r: 8, t: 8, b: 40 },
      },
    };
  };
  // The key names blocks to blame only where some are marked in the stack that is shown.
  const markGuilty = () => document.querySelectorAll(".key .guilty").forEach((swatch) => {
    swatch.parentElement.hidden = !checks.some((check) => Object.values(check.guilty).some((found) => found.depth === view().depth));
  });
  const drawPanels = data.panels.map((panel) => plot(`plot-${panel.name}`, panelPlot(panel)));
  markGuilty();

  // One number against depth, width or step, before and after training, on logarithmic axes.
  const marks = (check, when, points, words) => ({
    x: points.map((p) => p.x), y: points.map((p) => p.y), mode: "lines+markers",
    line: { color: colour(check.scheme), width: 1.6, dash: when === "before" ? "dot" : "solid" },
    marker: { color: colour(check.scheme), symbol: WHEN[when].symbol, size: 10, line: { width: 2, color: colour(check.scheme) } },
    error_y: points.some((p) => p.high > p.low) ? {
      type: "data", symmetric: false, array: points.map((p) => p.high - p.y), arrayminus: points.map((p) => p.y - p.low),
      thickness: 1.5, width: 4, color: colour(check.scheme),
    } : undefined,
    meta: { scheme: check.scheme, part: when },
    hovertemplate: `${owner(check)}${WHEN[when].words}, ${words}: %{y:.4g}<extra></extra>`,
  });
  const law = (check, when, fit, words) => ({
    x: fit.x, y: fit.y, mode: "lines", line: { color: colour(check.scheme), width: 1.2, dash: "dot" },
    meta: { scheme: check.scheme, part: `law ${when}` },
    hovertemplate: `${owner(check)}${WHEN[when].words}: ${words} ∝ L^${fit.p}<extra></extra>`,
  });
  // Growth ∝ √L and ∝ L from the lowest point, up to where they leave the plot.
  const guides = (from, low, high, top) => [0.5, 1].map((p) => {
    const end = Math.min(high, low * (top / from) ** (1 / p));
    return {
      x: [low, end], y: [from, from * (end / low) ** p], mode: "lines+text", hoverinfo: "skip", textposition: "top left",
      text: ["", p === 1 ? "∝ L " : "∝ √L "], textfont: { color: css("--muted"), size: 12 },
      line: { color: css("--line"), width: 1.5 }, meta: { part: "guide" },
    };
  });
  const depthPlot = (field, title) => () => {
    const traces = [];
    const all = [...new Set(checks.flatMap((check) => check.depths))].sort((a, b) => a - b);
    shown().forEach((check) => Object.entries(check.ladder).forEach(([when, rungs]) => {
      const points = rungs[field].filter((rung) => rung[1] > 0).map(([x, y, low, high]) => ({ x, y, low, high }));
      if (!points.length) return;
      const fit = check.fits[when][field];
      if (fit && known(fit.y).length === 2 && Math.min(...fit.y) > 0) traces.push(law(check, when, fit, title));
      traces.push(marks(check, when, points, "%{x} blocks"));
    }));
    const values = traces.filter((trace) => trace.mode === "lines+markers").flatMap((trace) => trace.y);
    const fitted = field === "G" ? [...values, ...data.gradient.filter((limit) => values.some((y) => y / limit < 20 && limit / y < 20))] : values;
    const room = known(fitted).length ? [Math.min(...fitted), Math.max(...fitted)].map(Math.log10) : [0, 1];
    const pad = Math.max(0.12 * (room[1] - room[0]), 0.12);
    const range = [room[0] - pad, room[1] + 2 * pad];
    if (field === "rms" && values.length) traces.unshift(...guides(Math.min(...values), all[0], 2 * all[all.length - 1], 10 ** (range[1] - 0.4 * pad)));
    return {
      traces,
      layout: {
        shapes: field === "G" ? data.gradient.map((limit) => rule(limit, { line: { color: css("--bad"), width: 1.5 } })) : [],
        xaxis: axis("Blocks", { type: "log", tickvals: [...all, 2 * all[all.length - 1]], ticktext: [...all, 2 * all[all.length - 1]].map(String) }),
        yaxis: axis(title, { type: "log", range, ...logTicks(range.map((power) => 10 ** power)) }),
      },
    };
  };
  plot("plot-ladder-rms", depthPlot("rms", "RMS of the last state"));
  plot("plot-ladder-G", depthPlot("G", "G, gradient's gain"));

  const rungPlot = (rungs, at, field, titles, scale) => () => {
    const traces = [];
    shown().forEach((check) => ["before", "after"].forEach((when) => {
      const points = rungs(check, when).map((rung) => ({ x: rung[at], y: rung[field] })).filter((p) => p.y !== null && (scale !== "log" || p.y > 0));
      if (points.length) traces.push(marks(check, when, points, `${titles[0]} %{x}`));
    }));
    const ticks = [...new Set(traces.flatMap((trace) => trace.x))];
    return {
      traces,
      layout: {
        xaxis: axis(titles[0], { type: "log", tickvals: ticks, ticktext: ticks.map(digits) }),
        yaxis: axis(titles[1], { type: scale, ...(scale === "log" ? logTicks(traces.flatMap((trace) => trace.y)) : { nticks: 6 }) }),
      },
    };
  };
  const steps = (check, when) => check.steps.map((rung) => ({ step: rung.step, ...rung[when] }));
  const widths = (check, when) => check.widths.filter((rung) => rung.when === when);
  plot("plot-step-rms", rungPlot(steps, "step", "rms", ["Residual step Δt", "RMS of the last state"], "log"));
  plot("plot-step-G", rungPlot(steps, "step", "G", ["Residual step Δt", "G, gradient's gain"], "log"));
  plot("plot-step-loss", rungPlot(steps, "step", "loss", ["Residual step Δt", "Loss (nats)"], "linear"));
  plot("plot-width-rms", rungPlot(widths, "width", "rms", ["Width", "RMS of the last state"], "log"));
  plot("plot-width-G", rungPlot(widths, "width", "G", ["Width", "G, gradient's gain"], "log"));

  plot("plot-burst", () => {
    const traces = [], shapes = [];
    shown().forEach((check) => {
      const deepest = Math.max(...check.curves.map((curve) => curve.depth));
      check.curves.forEach((curve) => traces.push({
        x: curve.loss.map((_, i) => i), y: curve.loss, mode: "lines", connectgaps: false,
        line: { color: faded(colour(check.scheme), curve.depth === deepest ? 1 : 0.35 + 0.35 * (curve.depth / deepest)), width: curve.depth === deepest ? 2.6 : 1.6 },
        meta: { scheme: check.scheme, part: curve.depth },
        hovertemplate: `${owner(check)}${curve.depth} blocks, step %{x}: %{y:.3f}<extra></extra>`,
      }));
      if (check.unigram !== null) shapes.push(rule(check.unigram, { line: { color: css("--muted"), width: 1, dash: "dash" } }));
    });
    const values = known(traces.flatMap((trace) => trace.y));
    const steep = Math.min(...values) > 0 && Math.max(...values) > 20 * Math.min(...values);
    const scale = steep ? { type: "log", ...logTicks(values) } : { nticks: 6 };
    return { traces, layout: { shapes, xaxis: axis("Step"), yaxis: axis("Loss (nats)", scale) } };
  });

  plot("plot-rates", () => {
    const ladders = checks.filter((check) => check.rates);
    const values = known(ladders.flatMap(({ rates }) => [...rates.losses, ...(rates.twin?.losses ?? []), rates.start]));
    const high = Math.max(...ladders.map(({ rates }) => rates.start)) * 1.08;
    const low = Math.min(...values) - (several ? 0.1 : 0) * (high - Math.min(...values));
    const traces = [], shapes = [];
    const line = (ladder, losses, ink, words, part) => {
      const top = (loss) => (loss === null || loss > high ? high : loss);
      traces.push({
        x: ladder.rates, y: losses.map(top), mode: "lines+markers", line: { color: ink, width: 2 },
        marker: { color: ink, size: 9, symbol: losses.map((loss) => (loss === null ? "x" : "circle")) },
        text: losses.map((loss) => (loss === null ? "broke" : loss.toFixed(3))), meta: { part },
        hovertemplate: `${words}, rate %{x:.3g}: %{text}<extra></extra>`,
      });
    };
    ladders.forEach((check) => {
      const ladder = check.rates;
      if (ladder.twin && !several) line(ladder, ladder.twin.losses, css("--series-6"), text(ladder.twin.name), "twin");
      if (hidden.has(check.scheme)) return;
      line(ladder, ladder.losses, colour(check.scheme), name(check), check.scheme);
      // Two ranges would hide each other as areas: they become bars at the foot of the plot.
      if (ladder.usable) shapes.push({
        type: "rect", yref: "paper", x0: ladder.usable[0], x1: ladder.usable[1], line: { width: 0 }, layer: "below",
        y0: several ? 0.01 + 0.035 * check.scheme : 0, y1: several ? 0.035 + 0.035 * check.scheme : 1,
        fillcolor: several ? faded(colour(check.scheme), 0.6) : faded(css("--good"), 0.1),
      });
    });
    ladders.slice(0, 1).forEach(({ rates }) => shapes.push(
      rule(rates.reference + (rates.start - rates.reference) / 4, { line: { color: css("--muted"), width: 1, dash: "dash" } }),
    ));
    const ticks = ladders[0].rates.rates;
    return {
      traces,
      layout: {
        shapes,
        xaxis: axis("Learning rate", { type: "log", tickvals: ticks, ticktext: ticks.map(rate), tickangle: narrow() ? -60 : 0 }),
        yaxis: axis("Loss (nats)", { range: [low - (high - low) * 0.06, high + (high - low) * 0.05] }),
      },
    };
  });

  plot("plot-slopes", () => {
    const traces = [];
    const SYMBOLS = ["circle", "square", "diamond", "triangle-up"];
    shown().filter((check) => check.theory).forEach((check) => ["before", "after"].forEach((when) => {
      (check.theory[when]?.slopes ?? []).forEach((slope, k) => traces.push({
        x: slope.values.map((_, i) => i), y: slope.values, mode: "lines+markers",
        line: { color: colour(several ? check.scheme : k), width: 2, dash: WHEN[when].dash },
        marker: { color: colour(several ? check.scheme : k), symbol: SYMBOLS[k % 4], size: 5 }, name: `${owner(check)}${text(slope.branch)}`,
        meta: { scheme: check.scheme, part: when }, showlegend: when === "before" || !check.theory.before,
        hovertemplate: `${owner(check)}${text(slope.branch)}, block %{x}, ${WHEN[when].words}: %{y:.4g}<extra></extra>`,
      }));
    }));
    return {
      traces,
      layout: {
        showlegend: true, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
        xaxis: axis("Block"), yaxis: axis("Slope Λ", { type: "log", ...logTicks(traces.flatMap((trace) => trace.y)) }),
      },
    };
  });

  plot("plot-scale", () => {
    const traces = [];
    shown().filter((check) => check.theory).forEach((check) => check.theory.scale.forEach((row) => {
      // Designs are tested at factors of their own: all lines start at one.
      const [factor, unit] = [row.factors[0], row.gains[0]];
      traces.push({
        x: row.factors.map((each) => each / factor), y: row.gains.map((gain) => (gain === null || !unit ? null : gain / unit)), mode: "lines+markers",
        line: { color: faded(colour(check.scheme), 0.55), width: 1.6 }, marker: { color: colour(check.scheme), size: 6 },
        meta: { scheme: check.scheme }, hovertemplate: `${owner(check)}block ${row.block}, ${text(row.branch)}, × %{x}: %{y:.3f}<extra></extra>`,
      });
    }));
    const factors = [...new Set(traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
    if (factors.length) traces.unshift({
      x: factors, y: factors, mode: "lines", line: { color: css("--muted"), dash: "dot", width: 1.2 }, hoverinfo: "skip", meta: { part: "guide" },
    });
    const ticks = factors.length ? factors : [1];
    return {
      traces,
      layout: {
        xaxis: axis("Last matrix, relative", { type: "log", tickvals: ticks, ticktext: ticks.map(digits) }),
        yaxis: axis("Gradient of the branch, relative", { type: "log", tickvals: ticks, ticktext: ticks.map(digits) }),
      },
    };
  });

  document.querySelectorAll("#profiles input, #profiles select").forEach((input) => {
    input.addEventListener("input", () => [...drawPanels, markGuilty].forEach((draw) => draw()));
  });
  // What was drawn while it was folded away has no width yet.
  document.querySelectorAll("main details").forEach((details) => details.addEventListener("toggle", () => {
    details.querySelectorAll(".js-plotly-plot").forEach((element) => Plotly.Plots.resize(element));
  }));
})();
