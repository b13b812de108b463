"use strict";
// The plots of a comparison or a run, drawn from the data in the page.
(() => {
  const { data, schemes, hidden, style, colour, css, text, brief, narrow, faded, chosen, rate, axis, plot } = NormLab;
  const shown = (k) => !hidden.has(k);
  const control = (id) => document.getElementById(id);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const known = (values) => values.filter((value) => value !== null);
  // On a log axis plotly wants powers, and nothing at or below zero.
  const range = (values, scale) => {
    const usable = values.filter((value) => Number.isFinite(value) && (scale !== "log" || value > 0));
    if (!usable.length) return undefined;
    const ends = [usable.reduce((a, b) => Math.min(a, b)), usable.reduce((a, b) => Math.max(a, b))];
    const [low, high] = ends.map((value) => (scale === "log" ? Math.log10(value) : value));
    const room = (high - low || Math.abs(high) * 0.1 || 1) * 0.05;
    return [low - room, high + room];
  };

  plot("plot-ranking", (element) => {
    const entries = data.ranking.filter((entry) => shown(entry.scheme));
    element.style.setProperty("--lines", entries.length);
    const traces = entries.map(({ scheme: k, mean: middle, low, high, verdict }) => ({
      x: [middle], y: [k], mode: "markers", name: text(schemes[k].label),
      // Nothing is claimed of a scheme that failed somewhere: its mark is hollow.
      marker: { color: colour(k), symbol: style(k).symbol + (verdict === "unreliable" ? "-open" : ""), size: 12, line: { width: 2, color: colour(k) } },
      error_x: low === null ? undefined : {
        type: "data", symmetric: false, array: [high - middle], arrayminus: [middle - low], thickness: 2.5, width: 5,
        color: colour(k),
      },
      hovertemplate: `%{fullData.name}: %{x:+.4f}<br>${text(verdict)}<extra></extra>`,
    }));
    const zero = { type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: css("--muted"), dash: "dot", width: 1 } };
    const base = schemes.find((scheme) => scheme.baseline);
    return {
      traces,
      layout: {
        shapes: [zero],
        xaxis: axis(`Difference to ${brief(base ? base.label : "the baseline", 24)}`, { nticks: narrow() ? 4 : 9, tickangle: 0 }),
        yaxis: axis("", {
          type: "category", categoryarray: entries.map((entry) => entry.scheme), autorange: "reversed",
          tickvals: entries.map((entry) => entry.scheme), gridcolor: "rgba(0, 0, 0, 0)",
          ticktext: entries.map((entry) => brief(schemes[entry.scheme].label, narrow() ? 14 : 32)),
        }),
      },
    };
  });

  // The debiased exponential mean: early points are not pulled towards zero.
  const smooth = (values, weight) => {
    let sum = 0, share = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  };
  const runsOf = (k) => {
    const picked = control("curve-rate")?.value ? Number(control("curve-rate").value) : schemes[k].lr;
    const runs = data.curves.filter((run) => run.scheme === k && (picked === null || run.lr === picked));
    const judges = runs.filter((run) => run.role === "judge");
    return judges.length ? judges : runs;
  };
  // The baseline's run with the same seed, step by step: what is left is the scheme's own.
  const minusBaseline = (run, kind, weight) => {
    const base = runsOf(schemes.findIndex((scheme) => scheme.baseline)).find((other) => other.seed === run.seed);
    const at = new Map(base ? base[kind].step.map((step, i) => [step, i]) : []);
    const [own, other] = [run, base || run].map((each) => smooth(each[kind].value, weight));
    return own.map((value, i) => {
      const below = at.has(run[kind].step[i]) ? other[at.get(run[kind].step[i])] : null;
      return value === null || below === null ? null : value - below;
    });
  };
  // Points of all seeds by step: where they lie on the chosen axis, their mean, lowest and highest.
  const together = (runs, { kind, x, weight, difference }) => {
    const at = new Map();
    runs.forEach((run) => {
      const { step, value: own } = run[kind];
      const values = difference ? minusBaseline(run, kind, weight) : smooth(own, weight);
      values.forEach((value, i) => {
        const place = run[kind][x][i];
        if (value === null || place === null) return;
        if (!at.has(step[i])) at.set(step[i], { x: [], y: [] });
        at.get(step[i]).x.push(place);
        at.get(step[i]).y.push(value);
      });
    });
    return [...at.entries()].sort(([a], [b]) => a - b).map(([, { x: places, y }]) => ({
      x: mean(places), y: mean(y), low: Math.min(...y), high: Math.max(...y), seeds: y.length,
    }));
  };
  const lineOf = (k, points) => ({
    x: points.map((p) => p.x), y: points.map((p) => p.y), mode: points.length > 1 ? "lines" : "markers",
    name: text(schemes[k].label), line: { color: colour(k), width: 2.2, dash: style(k).dash },
    marker: { color: colour(k), symbol: style(k).symbol, size: 8 },
    customdata: points.map((p) => [p.low, p.high, p.seeds]), meta: { scheme: k, part: "mean" },
    hovertemplate: "%{fullData.name}: %{y:.4f}<br>%{customdata[0]:.4f} to %{customdata[1]:.4f}, %{customdata[2]} seeds<extra></extra>",
  });
  const bandOf = (k, points) => {
    const wide = points.filter((p) => p.seeds > 1);
    const back = [...wide].reverse();
    return {
      x: [...wide, ...back].map((p) => p.x), y: [...wide.map((p) => p.high), ...back.map((p) => p.low)],
      mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faded(colour(k), 0.17), hoverinfo: "skip",
      meta: { scheme: k, part: "band" },
    };
  };
  const brokenOf = (k, points) => ({
    x: points.map((p) => p.x), y: points.map((p) => p.y), mode: "lines+markers", name: text(schemes[k].label),
    line: { color: colour(k), width: 1.4, dash: "dot" }, meta: { scheme: k, part: "failed" },
    marker: { color: colour(k), symbol: "x", size: points.map((_, i) => (i === points.length - 1 ? 10 : 0)) },
    hovertemplate: "%{fullData.name}, failed or stuck: %{y:.4f}<extra></extra>",
  });
  const drawCurves = plot("plot-curves", () => {
    const kind = chosen("curve-kind");
    const view = {
      kind, x: chosen("curve-x"), weight: kind === "train" ? Number(control("curve-smoothing").value) : 0,
      difference: chosen("curve-y") === "difference",
    };
    const xScale = chosen("curve-x-scale"), yScale = view.difference ? "linear" : chosen("curve-y-scale");
    const traces = [], bounds = [];
    schemes.forEach((_, k) => {
      if (!shown(k)) return;
      const runs = runsOf(k);
      const points = together(runs.filter((run) => !run.lost), view);
      runs.filter((run) => run.lost).forEach((run) => {
        const broken = together([run], view);
        if (broken.length) traces.push(brokenOf(k, broken));
      });
      if (!points.length) return;
      if (points.some((p) => p.seeds > 1)) traces.push(bandOf(k, points));
      traces.push(lineOf(k, points));
      // The steep start would flatten the rest; on a log axis it has room.
      const start = xScale === "log" ? 0 : Math.floor(points.length / 5);
      bounds.push(...points.slice(start).flatMap((p) => [p.low, p.high]));
    });
    control("curves-empty").hidden = traces.length > 0;
    const titles = { tokens: data.budget, step: "Steps", seconds: "Seconds of training" };
    const what = data.axes[kind] + (view.difference ? " minus the baseline's" : "");
    return {
      traces,
      layout: {
        // Zooming survives a change of theme, not one of what is drawn.
        uirevision: [kind, view.x, view.difference, xScale, yScale].join(),
        xaxis: axis(titles[view.x], { type: xScale, exponentformat: "SI", dtick: xScale === "log" ? "D2" : undefined }),
        // A run that blew up is not in the bounds: it must not flatten the others.
        yaxis: axis(what, { type: yScale, range: range(bounds, yScale) }),
      },
    };
  });

  // Labels that fit: the lowest rate, and from there every second, third, ... one.
  const labelled = (rates, most) => {
    const stride = Math.ceil(rates.length / most);
    return rates.filter((_, i) => i % stride === 0);
  };
  const drawRates = plot("plot-rates", () => {
    const values = known(data.rates.map((entry) => entry.value));
    const judged = known(data.rates.filter((entry) => entry.role === "judge" && !entry.stuck).map((entry) => entry.value));
    // A run that learnt nothing would flatten all others: what lies more than three times the spread of the judge runs away
    // is drawn as an arrow at the edge, until the reader wants to see all.
    const [bottom, top] = range(judged.length > 1 ? judged : values, "linear") || [0, 1];
    const near = values.filter((value) => value > bottom - 3 * (top - bottom) && value < top + 3 * (top - bottom));
    control("rates-outside").hidden = near.length === values.length;
    const [low, high] = range(chosen("rates-view") === "all" ? values : near, "linear") || [0, 1];
    const worst = data.higher ? low : high;
    const place = ({ value }) => (value === null ? worst : Math.min(Math.max(value, low), high));
    const far = ({ value }) => value !== null && (value < low || value > high);
    const symbol = (entry, own) => {
      if (far(entry)) return entry.value > high ? "arrow-bar-up" : "arrow-bar-down";
      if (entry.value === null || entry.stuck) return "x-thin";
      return entry.role === "judge" ? own : `${own}-open`;
    };
    const fate = (entry) => {
      if (entry.value === null) return entry.stuck ? "stuck, stopped early" : "failed";
      return entry.value.toFixed(4) + (entry.stuck ? ", stuck" : "");
    };
    const ticks = [...new Set(data.rates.map((entry) => entry.lr))].sort((a, b) => a - b);
    const [least, most] = [Math.log10(ticks[0]), Math.log10(ticks[ticks.length - 1])];
    const room = (most - least || 0.3) * 0.06;
    // Judge marks stand a little to the right of tune marks, so that both are seen.
    const aside = 10 ** (room / 3);
    const traces = [];
    schemes.forEach((scheme, k) => {
      const own = data.rates.filter((entry) => entry.scheme === k && shown(k));
      const tune = own.filter((entry) => entry.role === "tune" && entry.value !== null && !entry.stuck);
      const rates = [...new Set(tune.map((entry) => entry.lr))].sort((a, b) => a - b);
      traces.push({
        x: rates, y: rates.map((lr) => mean(tune.filter((entry) => entry.lr === lr).map((entry) => entry.value))),
        mode: "lines", line: { color: colour(k), width: 1.8, dash: style(k).dash }, hoverinfo: "skip",
      });
      traces.push({
        x: own.map((entry) => entry.lr * (entry.role === "judge" ? aside : 1)), y: own.map(place), mode: "markers",
        name: text(scheme.label), cliponaxis: false,
        text: own.map((entry) => `${fate(entry)}<br>${entry.role}, rate ${rate(entry.lr)}, seed ${entry.seed}`),
        hovertemplate: "%{fullData.name}: %{text}<extra></extra>",
        marker: {
          color: colour(k), symbol: own.map((entry) => symbol(entry, style(k).symbol)),
          size: own.map((entry) => (entry.role === "judge" ? 10 : 8)), opacity: 1, line: { width: 1.6, color: colour(k) },
        },
      });
    });
    const labels = labelled(ticks, narrow() ? 4 : 12);
    return {
      traces,
      layout: {
        uirevision: chosen("rates-view"),
        xaxis: axis("Learning rate", {
          type: "log", tickvals: labels, ticktext: labels.map(rate), range: [least - room, most + room],
        }),
        yaxis: axis(data.metric, { range: [low - (high - low) * 0.04, high + (high - low) * 0.04] }),
      },
    };
  });

  // 1, 2, 5 in every decade, or whole powers where there are many; plotly's own choice within less than a decade.
  const logTicks = (values) => {
    const [low, high] = range(values, "log") || [0, 0];
    if (high - low < 0.8) return {};
    const steps = high - low < 3 ? [1, 2, 5] : [1];
    const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
    const ticks = powers.flatMap((power) => steps.map((step) => Number(`${step}e${power}`)));
    const plain = (value) => (value >= 0.01 && value < 1e4 ? String(value) : rate(value));
    return { tickvals: ticks, ticktext: ticks.map(plain) };
  };
  const TITLES = {
    hidden_rms: "Hidden norm (RMS)", update_ms: "Update (mean square)", angular_speed: "Angle a block (rad)",
    token_cosine: "Cosine between tokens", effective_rank: "Effective rank", grad_norm: "Gradient norm",
  };
  const drawProfiles = Object.entries(TITLES).map(([name, title]) => plot(`plot-${name}`, () => {
    const step = data.profiles.steps[Number(control("profile-step").value)];
    const series = data.profiles.series.filter((entry) => entry.step === step && shown(entry.scheme));
    // A cosine may be negative.
    const scale = name === "token_cosine" ? "linear" : chosen("profile-scale");
    const ticks = scale === "log" ? logTicks(series.flatMap((entry) => entry[name].map(([, value]) => value))) : {};
    return {
      traces: series.map((entry) => ({
        x: entry[name].map(([layer]) => layer), y: entry[name].map(([, value]) => value), mode: "lines+markers",
        name: text(schemes[entry.scheme].label), line: { color: colour(entry.scheme), width: 2, dash: style(entry.scheme).dash },
        marker: { color: colour(entry.scheme), symbol: style(entry.scheme).symbol, size: 6 },
        hovertemplate: "%{fullData.name}, block %{x}: %{y:.4g}<extra></extra>",
      })),
      layout: {
        // Blocks are whole: without this, few of them get ticks at halves.
        xaxis: axis("Block", Math.max(0, ...series.flatMap((entry) => entry[name].map(([layer]) => layer))) < 8 ? { dtick: 1 } : {}),
        yaxis: axis(title, { type: scale, exponentformat: "power", ...ticks }),
        margin: { l: 44, r: 8, t: 8, b: 40 },
      },
    };
  }));

  const say = () => {
    document.querySelectorAll("output").forEach((output) => {
      const input = control(output.htmlFor.value);
      const step = input.id === "profile-step";
      output.value = step ? data.profiles.steps[Number(input.value)] : Number(input.value).toFixed(2);
    });
  };
  const onChange = (selector, draws) => document.querySelectorAll(selector).forEach((input) => {
    input.addEventListener("input", () => {
      say();
      draws.forEach((draw) => draw());
    });
  });
  onChange("#curves input, #curves select", [drawCurves]);
  onChange("#profiles input", drawProfiles);
  onChange("#rates input", [drawRates]);
  say();
})();
