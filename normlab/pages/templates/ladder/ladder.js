"use strict";
// The plots of a ladder: gaps over compute, tokens and size, multipliers, the forecast, rates and the baseline's loss.
(() => {
  const { data, schemes, hidden, style, colour, css, text, brief, narrow, faded, chosen, rate, axis, plot } = NormLab;
  const shown = (k) => !hidden.has(k);
  const finite = (values) => values.filter(Number.isFinite);
  const signed = (value, digits = 4) => (value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`);
  const SUFFIXES = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]];
  const formatCount = (value) => {
    const [unit, size] = SUFFIXES.find(([, least]) => value >= 0.9995 * least) || ["", 1];
    return `${Number((value / size).toPrecision(3))}${unit}`;
  };
  const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const power = (value) => {
    const [mantissa, exponent] = value.toExponential(0).split("e");
    const digits = [...String(Number(exponent))].map((digit) => (digit === "-" ? "⁻" : SUPERSCRIPTS[digit])).join("");
    return mantissa === "1" ? `10${digits}` : `${mantissa}·10${digits}`;
  };
  const room = (values, share = 0.08) => {
    const usable = finite(values);
    if (!usable.length) return [-1, 1];
    const [low, high] = [Math.min(...usable), Math.max(...usable)];
    const more = (high - low || Math.abs(high) || 1) * share;
    return [low - more, high + more];
  };
  const logRoom = (values, share = 0.06) => room(values.map(Math.log10), share);
  const placeOf = (cell) => `${text(cell.size)}, ${formatCount(cell.tokens)} tokens`;
  const sizeSymbol = (size) => style(data.sizes.indexOf(size)).symbol;
  // Hollow: a short run. Cross: a cell that is left out of the fit.
  const marked = (symbol, cell) => (cell.usable ? symbol + (cell.short ? "-open" : "") : "x-thin");
  const line = (more) => ({ type: "line", line: { color: css("--muted"), dash: "dot", width: 1 }, ...more });
  const zero = () => line({ xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: css("--ink"), width: 1 } });
  // An interval need not contain the mean of its cell's seeds, so it is a trace of its own.
  const intervals = (k, x, cells) => {
    const known = cells.map((cell, i) => ({ ...cell, x: x[i] })).filter((cell) => cell.low !== null);
    return {
      x: known.map((cell) => cell.x), y: known.map((cell) => (cell.low + cell.high) / 2), mode: "markers", hoverinfo: "skip",
      marker: { size: 1, color: colour(k) }, meta: { scheme: k, part: "intervals" },
      error_y: { type: "data", array: known.map((cell) => (cell.high - cell.low) / 2), thickness: 2, width: 4, color: colour(k) },
    };
  };
  const gapWords = (cell) => `${placeOf(cell)}<br>gap ${signed(cell.mean)}` +
    (cell.low === null ? ", one seed" : ` (${signed(cell.low)} to ${signed(cell.high)}), ${cell.seeds.length} seeds`);

  // Decades and, where there are few, 2 and 5 between them.
  const logAxis = (title, values, write, most) => {
    const [low, high] = logRoom(values);
    const decades = Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, i) => 10 ** (Math.ceil(low) + i));
    const from = Math.floor(low);
    const fine = Array.from({ length: Math.ceil(high) - from + 1 }, (_, i) => [1, 2, 5].map((step) => step * 10 ** (from + i))).flat()
      .filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high);
    const ticks = fine.length <= most ? fine : decades.filter((_, i) => i % Math.ceil(decades.length / most) === 0);
    return axis(title, { type: "log", range: [low, high], tickvals: ticks, ticktext: ticks.map(write), tickangle: 0 });
  };

  // Gap over compute: one panel a scheme, with the smooth band, the simple law's dashed lines inside it, every paired seed and every cell's interval.
  const outline = (points, low, high, more) => {
    const known = points.filter((point) => Number.isFinite(point[low]) && Number.isFinite(point[high]));
    const back = [...known].reverse();
    return {
      x: [...known, ...back].map((point) => point.flops), y: [...known.map((point) => point[high]), ...back.map((point) => point[low])],
      mode: "lines", hoverinfo: "skip", ...more,
    };
  };
  const ribbonTrace = (k) => (points) => outline(points, "low", "high", {
    line: { width: 0 }, fill: "toself", fillcolor: faded(colour(k), 0.16), meta: { scheme: k, part: "band" },
  });
  // Beyond the top: a bar for the interval, dashed lines for the simple law. Multiples of the top are joined, a target stands alone.
  // Lines end before the first place that is not identified, as the band does.
  const beyondTraces = (k, all) => {
    const places = all.filter((place) => !place.refused), first = all.findIndex((place) => place.refused);
    const joined = all.slice(0, first < 0 ? all.length : first).filter((place) => place.multiple);
    const words = (place) => `${text(place.name)}<br>${signed(place.low)} to ${signed(place.high)}` +
      `<br>${signed(place.simple_low)} to ${signed(place.simple_high)} if it keeps a simple law`;
    const bars = places.flatMap((place) => [place.low, place.high, null]);
    const simple = places.flatMap((place) => [place.simple_low, place.simple_high, null]);
    const at = places.flatMap((place) => [place.flops, place.flops, null]);
    return [
      { x: at, y: bars, mode: "lines", line: { color: faded(colour(k), 0.3), width: 9 }, hoverinfo: "skip", meta: { scheme: k, part: "beyond" } },
      { x: at, y: simple, mode: "lines", line: { color: colour(k), width: 1.8, dash: "4px,3px" }, hoverinfo: "skip", meta: { scheme: k, part: "simple" } },
      ...["simple_low", "simple_high"].map((end) => ({
        x: joined.map((place) => place.flops), y: joined.map((place) => place[end]), mode: "lines", hoverinfo: "skip",
        line: { color: colour(k), width: 1.6, dash: "dash" }, meta: { scheme: k, part: "simple" },
      })),
      {
        x: places.map((place) => place.flops), y: places.map((place) => place.mean), mode: "markers", text: places.map(words),
        marker: { color: colour(k), size: 7, symbol: "line-ew-open", line: { width: 2, color: colour(k) } }, hovertemplate: "%{text}<extra></extra>",
        meta: { scheme: k, part: "places" },
      },
    ];
  };
  // A target far beyond the top would squeeze the ladder: it is shown on request.
  const reached = (entry) => (chosen("gap-reach") === "all" ? entry.beyond : entry.beyond.filter((place) => !place.far));
  const furtherNames = (entry) => {
    const left = entry.beyond.filter((place) => !reached(entry).includes(place));
    return left.length ? [{
      xref: "paper", x: 1, xanchor: "right", yref: "paper", y: 0, yanchor: "bottom", showarrow: false, align: "right",
      text: left.map((place) => `${brief(place.short, 20)}${place.refused ? " ?" : ""} →`).join("<br>"), bgcolor: faded(css("--surface"), 0.7), font: { size: 11, color: css("--muted") },
    }] : [];
  };
  // Seeds stand left of their cell's mean by a fiftieth of the axis.
  const apart = () => {
    const [low, high] = logRoom(everyPlace());
    return 10 ** ((high - low) / 50);
  };
  const everyPlace = () => data.gaps.flatMap((entry) => [...entry.cells, ...reached(entry)].map((point) => point.flops));
  const seedTrace = ({ scheme: k, cells }) => {
    const dots = cells.filter((cell) => cell.seeds.length > 1).flatMap((cell) => cell.seeds.map((seed) => ({ ...seed, cell })));
    return {
      x: dots.map((dot) => dot.cell.flops / apart()), y: dots.map((dot) => dot.gap), mode: "markers", meta: { scheme: k, part: "seeds" },
      marker: { color: faded(colour(k), 0.55), size: 5, symbol: "circle" }, hovertemplate: "%{text}<extra></extra>",
      text: dots.map((dot) => `${placeOf(dot.cell)}<br>seed ${dot.seed}: ${signed(dot.gap)}`),
    };
  };
  const cellTrace = ({ scheme: k, cells }) => ({
    x: cells.map((cell) => cell.flops), y: cells.map((cell) => cell.mean), mode: "markers",
    text: cells.map(gapWords), hovertemplate: "%{text}<extra></extra>", meta: { scheme: k, part: "cells" },
    marker: { color: colour(k), size: 9, symbol: cells.map((cell) => marked(sizeSymbol(cell.size), cell)), line: { width: 1.6, color: colour(k) } },
  });
  const cellEnds = (cells) => cells.flatMap((cell) => [cell.mean, cell.low, cell.high, ...cell.seeds.map((seed) => seed.gap)]);
  // The band far beyond the ladder is wide: it may take as much room as the cells and no more, so that they stay readable.
  const gapRange = (entries) => {
    const usable = finite([...entries.flatMap((entry) => cellEnds(entry.cells)), 0]);
    const [low, high] = [Math.min(...usable), Math.max(...usable)];
    const inside = finite(entries.flatMap((entry) => [...entry.ribbons.flat(), ...reached(entry)].flatMap((point) => [point.low, point.high])));
    const most = (high - low) || 0.02;
    return room([low, high, ...inside.map((value) => Math.min(Math.max(value, low - 0.6 * most), high + 0.6 * most))], 0.04);
  };
  const beyond = (entry, last) => {
    const { top } = entry, places = reached(entry);
    const area = { type: "rect", yref: "paper", x0: top * 1.06, x1: last * 4, y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: faded(css("--series-6"), 0.07) };
    return [...(places.length ? [area] : []), ...places.map((place) => line({ yref: "paper", x0: place.flops, x1: place.flops, y0: 0, y1: 0.9 }))];
  };
  // Multiples of the top are named in the first line, targets in the second, so that they do not run into each other.
  const placeNames = (places) => places.map((place) => ({
    x: Math.log10(place.flops), xref: "x", yref: "paper", y: 1, yanchor: "top", yshift: place.multiple ? 0 : -14, showarrow: false,
    xanchor: place.multiple ? "center" : "right", xshift: place.multiple ? 0 : 14, text: brief(place.short, 20), bgcolor: faded(css("--surface"), 0.7), borderpad: 1,
    font: { size: 11, color: css("--muted") },
  }));
  // Half-way up, where an interval would be: at the value of no gap in particular.
  const questions = (places) => places.filter((place) => place.refused).map((place) => ({
    x: Math.log10(place.flops), xref: "x", yref: "paper", y: 0.5, yanchor: "middle", showarrow: false, text: "<b>?</b>",
    bgcolor: css("--surface"), font: { size: 13, color: css("--ink") },
  }));
  const gapEntries = () => data.gaps.filter((entry) => shown(entry.scheme));
  const gapPlots = data.gaps.map((entry) => plot(`plot-gap-${entry.scheme}`, (element) => {
    element.closest(".panel").hidden = !shown(entry.scheme);
    const own = chosen("gap-scale") === "own" || !gapEntries().length ? [entry] : gapEntries();
    const places = everyPlace();
    return {
      traces: [...entry.ribbons.map(ribbonTrace(entry.scheme)), ...beyondTraces(entry.scheme, reached(entry)), seedTrace(entry), intervals(entry.scheme, entry.cells.map((cell) => cell.flops), entry.cells), cellTrace(entry)],
      layout: {
        uirevision: chosen("gap-scale") + chosen("gap-reach"), shapes: [...beyond(entry, Math.max(...places)), zero()],
        annotations: [...placeNames(reached(entry)), ...questions(reached(entry)), ...furtherNames(entry)],
        xaxis: logAxis("Training FLOPs", places, power, narrow() ? 4 : 6),
        yaxis: axis(`Gap to ${brief(data.baseline, 16)} (nats)`, { range: gapRange(own), tickformat: ".3~f", nticks: 7 }),
        margin: { l: 58, r: 14, t: 12, b: 44 },
      },
    };
  }));

  // Small multiples: lines over tokens at one size, over size at one budget. Schemes stand a little apart.
  const aside = (k) => 1.022 ** (k - schemes.length / 2);
  const slice = (id, keep, x, title) => plot(id, () => {
    const entries = gapEntries().map((entry) => ({ ...entry, cells: entry.cells.filter(keep).sort((a, b) => x(a) - x(b)) }));
    const places = data.gaps.flatMap((entry) => entry.cells.map(x));
    const ticks = [...new Set(places)].sort((a, b) => a - b);
    const [low, high] = logRoom(places, 0.12);
    return {
      traces: entries.filter((entry) => entry.cells.length).flatMap(({ scheme: k, cells }) => [intervals(k, cells.map((cell) => x(cell) * aside(k)), cells), {
        x: cells.map((cell) => x(cell) * aside(k)), y: cells.map((cell) => cell.mean), mode: "lines+markers",
        line: { color: colour(k), width: 1.8, dash: style(k).dash }, text: cells.map(gapWords), name: text(schemes[k].label),
        marker: { color: colour(k), size: 7, symbol: cells.map((cell) => marked(style(k).symbol, cell)), line: { width: 1.4, color: colour(k) } },
        hovertemplate: "%{fullData.name}, %{text}<extra></extra>", meta: { scheme: k, part: "cells" },
      }]),
      layout: {
        shapes: [zero()], margin: { l: 50, r: 8, t: 8, b: 40 },
        xaxis: axis(title, { type: "log", range: [low, high], tickvals: ticks, ticktext: ticks.map(formatCount), tickangle: 0 }),
        yaxis: axis("Gap (nats)", { range: room([...gapEntries().flatMap((entry) => cellEnds(entry.cells)), 0], 0.05), tickformat: ".3~f", nticks: 6 }),
      },
    };
  });
  data.sizes.forEach((size, i) => slice(`plot-tokens-${i}`, (cell) => cell.size === size, (cell) => cell.tokens, "Tokens"));
  data.budgets.forEach((tokens, i) => slice(`plot-sizes-${i}`, (cell) => cell.tokens === tokens, (cell) => cell.parameters, "Parameters"));

  const drawMultiplier = plot("plot-multiplier", () => {
    const kind = chosen("multiplier-kind") || "flops";
    const entries = data.multipliers.filter((entry) => shown(entry.scheme)).map((entry) => ({ ...entry, points: entry.points.filter((point) => point[kind]) }));
    const every = data.multipliers.flatMap((entry) => entry.points.map((point) => point.cell.flops));
    const ends = entries.flatMap(({ points }) => points.flatMap((point) => [point[kind].mean, point[kind].low, point[kind].high]));
    const [low, high] = room([...finite(ends).filter((value) => value > 0), 1].map(Math.log10), 0.06);
    const span = 10 ** (high - low);
    const ticks = [0.1, 0.2, 0.33, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10].filter((tick) => span < 1.4 || ![0.95, 1.05].includes(tick))
      .filter((tick) => span < 4 || ![0.33, 0.8, 0.9, 1.1, 1.2, 1.3].includes(tick)).filter((tick) => span < 2 || ![0.9, 1.1, 1.3].includes(tick));
    return {
      traces: entries.filter((entry) => entry.points.length).flatMap(({ scheme: k, points }) => {
        const cells = points.map((point) => ({ ...point.cell, ...point[kind] }));
        const x = cells.map((cell) => cell.flops * aside(k));
        return [intervals(k, x, cells), {
          x, y: cells.map((cell) => cell.mean), mode: "markers", name: text(schemes[k].label),
          marker: { color: colour(k), size: 9, symbol: cells.map((cell) => marked(sizeSymbol(cell.size), cell)), line: { width: 1.6, color: colour(k) } },
          text: cells.map((cell) => `${placeOf(cell)}<br>× ${cell.mean.toFixed(3)}` + (cell.low === null ? "" : ` (${cell.low.toFixed(3)} to ${cell.high.toFixed(3)})`)),
          hovertemplate: "%{fullData.name}, %{text}<extra></extra>", meta: { scheme: k, part: "cells", kind },
        }];
      }),
      layout: {
        uirevision: kind, margin: { l: 58, r: 14, t: 12, b: 44 },
        shapes: [line({ xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: css("--ink"), width: 1 } })],
        xaxis: logAxis("Training FLOPs", every, power, narrow() ? 4 : 8),
        yaxis: axis(kind === "time" ? "Multiplier in time" : "Multiplier in FLOPs", { type: "log", range: [low, high], tickvals: ticks, ticktext: ticks.map(String) }),
      },
    };
  });
  document.querySelectorAll("#multiplier input").forEach((input) => input.addEventListener("input", drawMultiplier));
  document.querySelectorAll("#gaps .controls input").forEach((input) => input.addEventListener("input", () => gapPlots.forEach((draw) => draw())));

  // The forecast: a box from before the runs, a mark for what came.
  plot("plot-forecast", (element) => {
    const entries = data.forecast.filter((entry) => shown(entry.scheme));
    element.style.setProperty("--lines", Math.max(2, entries.length));
    const at = (i) => entries.length - 1 - i;
    const box = (entry, i, low, high, height, more) => ({
      type: "rect", x0: entry[low], x1: entry[high], y0: at(i) - height, y1: at(i) + height, layer: "between", ...more,
    });
    const boxes = entries.flatMap((entry, i) => [
      box(entry, i, "low", "high", 0.3, { line: { color: colour(entry.scheme), width: 1 }, fillcolor: faded(colour(entry.scheme), 0.16) }),
      ...(entry.simple_low === null ? [] : [box(entry, i, "simple_low", "simple_high", 0.2, { line: { color: colour(entry.scheme), width: 1.4, dash: "dash" } })]),
    ]);
    const came = entries.map((entry, i) => ({ ...entry, y: at(i) })).filter((entry) => entry.came !== null);
    const words = (entry) => `forecast ${signed(entry.low)} to ${signed(entry.high)}<br>came ${signed(entry.came)}: ${entry.hit ? "inside" : "outside"}`;
    return {
      traces: [{
        x: came.map((entry) => entry.came), y: came.map((entry) => entry.y), mode: "markers", text: came.map(words), hovertemplate: "%{text}<extra></extra>",
        marker: { size: 12, symbol: came.map((entry) => (entry.hit ? "circle" : "x")), color: came.map((entry) => colour(entry.scheme)), line: { width: 1.4, color: css("--surface") } },
        meta: { part: "came" },
      }],
      layout: {
        shapes: [...boxes, line({ yref: "paper", x0: 0, x1: 0, y0: 0, y1: 1, line: { color: css("--ink"), width: 1 } })],
        xaxis: axis(`Gap to ${brief(data.baseline, 16)} (nats)`, { range: room([0, ...entries.flatMap((entry) => [entry.low, entry.high, entry.came])]), tickformat: ".3~f", nticks: narrow() ? 4 : 9, tickangle: 0 }),
        yaxis: axis("", {
          range: [-0.6, entries.length - 0.4], tickvals: entries.map((_, i) => at(i)), gridcolor: "rgba(0, 0, 0, 0)",
          ticktext: entries.map((entry) => `${brief(schemes[entry.scheme].label, narrow() ? 9 : 24)}, ${formatCount(entry.tokens)}`),
        }),
      },
    };
  });

  // Rates tried: one panel a size and budget; the pick is filled, a ring marks a pick at an edge, a cross a run that did not train.
  const trained = (entry) => entry.loss !== null && entry.state === "done";
  data.rates.forEach((panel, i) => plot(`plot-rates-${i}`, () => {
    const every = data.rates.flatMap((other) => other.searches.flatMap((search) => search.tried.map((tried) => tried.lr)));
    const ticks = [...new Set(panel.searches.flatMap((search) => search.tried.map((tried) => tried.lr)))].sort((a, b) => a - b);
    const losses = panel.searches.flatMap((search) => search.tried.filter(trained).map((tried) => tried.loss));
    const [low, high] = room(losses);
    const visible = panel.searches.filter((search) => shown(search.scheme));
    // Rates lie at odd distances: the next label is the next rate that leaves room for the last one.
    const apart = Math.log(every.reduce((a, b) => Math.max(a, b)) / every.reduce((a, b) => Math.min(a, b))) / (narrow() ? 5 : 7);
    const labels = ticks.reduce((kept, lr) => (kept.length && Math.log(lr / kept[kept.length - 1]) < apart ? kept : [...kept, lr]), []);
    return {
      traces: visible.flatMap(({ scheme: k, tried, pick, edge }) => {
        const done = tried.filter(trained);
        const rings = edge ? done.filter((entry) => entry.lr === pick) : [];
        return [
          { x: done.map((entry) => entry.lr), y: done.map((entry) => entry.loss), mode: "lines", line: { color: colour(k), width: 1.6, dash: style(k).dash }, hoverinfo: "skip", meta: { scheme: k, part: "line" } },
          {
            x: tried.map((entry) => entry.lr), y: tried.map((entry) => (trained(entry) ? entry.loss : high)), mode: "markers", name: text(schemes[k].label), cliponaxis: false,
            text: tried.map((entry) => `rate ${rate(entry.lr)}: ${trained(entry) ? entry.loss.toFixed(4) : text(entry.state)}${entry.lr === pick ? ", picked" : ""}`),
            hovertemplate: "%{fullData.name}, %{text}<extra></extra>", meta: { scheme: k, part: "tried" },
            marker: { color: colour(k), size: 9, symbol: tried.map((entry) => (trained(entry) ? style(k).symbol + (entry.lr === pick ? "" : "-open") : "x-thin")), line: { width: 1.6, color: colour(k) } },
          },
          { x: rings.map((entry) => entry.lr), y: rings.map((entry) => entry.loss), mode: "markers", hoverinfo: "skip", cliponaxis: false, marker: { symbol: "circle-open", size: 19, color: css("--bad"), line: { width: 2 } }, meta: { scheme: k, part: "edge" } },
        ];
      }),
      layout: {
        margin: { l: 50, r: 12, t: 10, b: 40 },
        xaxis: axis("Learning rate", { type: "log", range: logRoom(every, 0.1), tickvals: labels, ticktext: labels.map(rate), tickangle: 0 }),
        yaxis: axis("Validation loss", { range: [low, high + (high - low) * 0.06], nticks: 6 }),
      },
    };
  }));

  plot("plot-baseline", () => {
    const { points, fitted, floor } = data.baseline_law;
    const k = schemes.findIndex((scheme) => scheme.baseline);
    const losses = [...points, ...fitted].map((point) => point.loss);
    const names = floor ? [{
      xref: "paper", x: 0.99, xanchor: "right", y: (floor.low + floor.high) / 2, showarrow: false, text: "range of E", font: { size: 12, color: css("--ink") },
    }] : [];
    return {
      traces: [
        {
          x: fitted.map((point) => point.flops), y: fitted.map((point) => point.loss), mode: "markers", hovertemplate: "%{text}<extra></extra>", meta: { part: "law" },
          text: fitted.map((point) => `${placeOf(point)}<br>law: ${point.loss.toFixed(4)}`), marker: { symbol: "line-ew-open", size: 16, color: css("--ink"), line: { width: 1.6, color: css("--ink") } },
        },
        {
          x: points.map((point) => point.flops), y: points.map((point) => point.loss), mode: "markers", hovertemplate: "%{text}<extra></extra>", meta: { part: "runs" },
          text: points.map((point) => `${placeOf(point)}<br>seed ${point.seed}: ${point.loss.toFixed(4)}`),
          marker: { color: faded(colour(k), 0.75), size: 8, symbol: points.map((point) => sizeSymbol(point.size)) },
        },
      ],
      layout: {
        shapes: floor ? [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: floor.low, y1: floor.high, layer: "below", line: { width: 0 }, fillcolor: faded(colour(k), 0.14) }] : [],
        annotations: names, margin: { l: 58, r: 14, t: 12, b: 44 },
        xaxis: logAxis("Training FLOPs", points.map((point) => point.flops), power, narrow() ? 4 : 8),
        yaxis: axis("Validation loss (nats)", { range: room([...losses, ...(floor ? [floor.low, floor.high] : [])]), nticks: 7 }),
      },
    };
  });
})();
