"use strict";
// Asks the server for runs every few seconds and shows them. All text of runs is set as text, never as HTML.
const Watch = (() => {
  const { data, style, css, text, chosen, axis, plot } = NormLab;
  const DRAWN = 12; // runs that are drawn if nobody has chosen
  const known = { epoch: "", version: 0, runs: [], details: new Map() };
  const picked = new Map(); // run → whether its reader wants it drawn
  const control = (id) => document.getElementById(id);
  const make = (tag, content = "", more = {}) => Object.assign(document.createElement(tag), { textContent: content, ...more });

  // Runs in training come first: theirs are the curves and profiles that change.
  const isBusy = (run) => !["finished", "stopped"].includes(run.status.state);
  const byDefault = () => {
    const others = known.runs.filter((run) => !isBusy(run));
    return new Set([...known.runs.filter(isBusy), ...others].slice(0, DRAWN).map((run) => run.id));
  };
  const drawn = () => {
    const usual = byDefault();
    return known.runs.filter((run) => (picked.has(run.id) ? picked.get(run.id) : usual.has(run.id)));
  };

  // -- runs ----------------------------------------------------------------------------------------------------------
  const summary = () => {
    const counts = new Map();
    known.runs.forEach(({ status: { state } }) => counts.set(state, (counts.get(state) || 0) + 1));
    return [...counts].map(([state, count]) => `${count} ${state}`).join(" · ");
  };
  const rows = new Map(); // run → its row, which stays: focus and ticks are in it
  const makeRow = (run) => {
    const row = make("tr");
    const tick = make("input", "", { type: "checkbox" });
    tick.addEventListener("change", () => {
      picked.set(run.id, tick.checked);
      drawLoss();
    });
    const label = make("label");
    const swatch = make("span", "", { className: "swatch" });
    swatch.dataset.scheme = run.id;
    label.append(tick, swatch, make("span", "", { className: "name" }));
    const head = make("th", "", { scope: "row" });
    head.append(label);
    row.append(head, ...["State", "Step", "Loss", "Validation loss", "Tokens/s", "Last line", "Alarms"].map((title) => {
      const cell = make("td");
      cell.dataset.label = title;
      if (["Loss", "Validation loss", "Tokens/s", "Last line"].includes(title)) cell.className = "number";
      return cell;
    }));
    return row;
  };
  const fillRow = (row, run, isDrawn) => {
    const [head, state, step, loss, validation, speed, quiet, alarms] = row.cells;
    head.querySelector(".name").textContent = run.name;
    const tick = head.querySelector("input");
    if (tick.checked !== isDrawn) tick.checked = isDrawn;
    head.querySelector(".swatch").style.background = NormLab.colour(run.id);
    const word = make("span", run.status.words, { className: "state" });
    word.dataset.state = run.status.state;
    state.replaceChildren(word, ...(run.status.reason ? [make("span", run.status.reason, { className: "reason" })] : []));
    step.replaceChildren(run.progress, ...(run.left ? [make("span", `, ${run.left}`, { className: "left" })] : []));
    if (run.share !== null) {
      const bar = make("span", "", { className: "bar" });
      bar.append(make("i"));
      bar.firstChild.style.width = `${100 * run.share}%`;
      step.append(bar);
    }
    validation.replaceChildren(run.validation, ...(run.also ? [make("span", run.also, { className: "also" })] : []));
    [[loss, run.loss], [speed, run.speed], [quiet, run.quiet], [alarms, run.alarms]].forEach(([cell, words]) => {
      if (cell.textContent !== words) cell.textContent = words;
    });
  };
  const showRuns = () => {
    if (control("summary").textContent !== summary()) control("summary").textContent = summary();
    const shown = new Set(drawn().map((run) => run.id));
    known.runs.forEach((run) => {
      if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
      fillRow(rows.get(run.id), run, shown.has(run.id));
    });
    const order = known.runs.map((run) => rows.get(run.id));
    const body = control("run-rows");
    if (order.length !== body.rows.length || order.some((row, k) => row !== body.rows[k])) body.replaceChildren(...order);
  };

  // -- loss ----------------------------------------------------------------------------------------------------------
  const WORDS = { loss: "Loss (nats)", grad_norm: "Gradient norm", step: "Steps", tokens: "Tokens" };
  // What a reader wants to see is the end: the steep start would flatten it.
  const settled = (traces) => {
    const late = traces.flatMap(({ x, y }) => y.filter((value, k) => value !== null && k >= Math.min(y.length / 10, y.length - 2)));
    if (!late.length) return undefined;
    const low = Math.min(...late), high = Math.max(...late), room = 0.06 * (high - low || Math.abs(high) || 1);
    return [low - room, high + room];
  };
  const drawLoss = plot("plot-loss", () => {
    const kind = chosen("loss-kind"), along = chosen("loss-x"), scale = chosen("loss-y-scale");
    const traces = drawn().flatMap((run) => {
      const { curve, evals } = known.details.get(run.id);
      const { colour, dash } = style(run.id);
      const shared = { name: text(run.name), hovertemplate: `%{fullData.name}, ${along} %{x}: %{y:.4f}<extra></extra>` };
      const line = { ...shared, x: curve[along], y: curve[kind], mode: curve[kind].length > 1 ? "lines" : "markers", line: { color: colour, dash, width: 1.8 }, marker: { color: colour }, meta: { run: run.id, part: "training" } };
      if (kind !== "loss" || !evals.step.length) return [line];
      return [line, {
        ...shared, x: evals[along], y: evals.loss, mode: "markers", meta: { run: run.id, part: "validation" },
        marker: { color: css("--surface"), size: 8, line: { color: colour, width: 2 } },
      }];
    });
    const range = scale === "linear" ? settled(traces) : undefined;
    return {
      traces,
      layout: {
        // The same zoom stays while a run grows; another axis begins anew.
        uirevision: [kind, along, scale, chosen("loss-x-scale")].join(),
        xaxis: axis(WORDS[along], { type: chosen("loss-x-scale"), rangemode: "tozero" }),
        yaxis: axis(WORDS[kind], { type: scale, ...(range ? { range } : {}) }),
      },
    };
  });

  // -- blocks --------------------------------------------------------------------------------------------------------
  const stacks = () => [...known.runs.filter(isBusy), ...known.runs.filter((run) => !isBusy(run))].flatMap((run) => known.details.get(run.id).stacks.map((stack) => ({
    key: JSON.stringify([run.id, stack.name]), label: stack.name ? `${run.name}, ${stack.name}` : run.name, run, ...stack,
  })));
  const current = () => {
    const all = stacks();
    return all.find((stack) => stack.key === control("profiled").value) || all[0];
  };
  const showChoices = () => {
    const all = stacks(), select = control("profiled");
    const shows = control("profiles").hidden && all.length;
    control("profiles").hidden = !all.length;
    control("no-profiles").hidden = Boolean(all.length);
    // What was drawn while it was hidden has no size of its own.
    if (shows) document.querySelectorAll("#profiles .plot").forEach((element) => Plotly.Plots.resize(element));
    if (all.map((stack) => stack.key + stack.label).join() === [...select.options].map((option) => option.value + option.text).join()) return;
    const before = select.value;
    select.replaceChildren(...all.map((stack) => make("option", stack.label, { value: stack.key })));
    if (all.some((stack) => stack.key === before)) select.value = before;
  };
  const blockType = (values) => {
    const wish = chosen("blocks-scale"), usable = values.filter((value) => value > 0);
    if (wish !== "auto") return wish;
    return usable.length === values.length && Math.max(...usable) > 30 * Math.min(...usable) ? "log" : "linear";
  };
  const drawBlocks = Object.keys(data.measures).map((name) => plot(`plot-${name}`, () => {
    const stack = current();
    if (!stack) return { traces: [], layout: {} };
    const colour = style(stack.run.id).colour;
    const traces = [["first", css("--muted"), "dot", 1.6], ["newest", colour, "solid", 2.2]].filter(([part]) => stack[part][name]).map(([part, ink, dash, width]) => ({
      x: stack[part].layers, y: stack[part][name], mode: "lines+markers", marker: { color: ink, size: part === "newest" ? 5 : 3 },
      line: { color: ink, dash, width }, connectgaps: true, meta: { part },
      hovertemplate: `step ${stack[part].step}, block %{x}: %{y:.4g}<extra></extra>`,
    }));
    const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null);
    return {
      traces,
      layout: {
        uirevision: [stack.key, chosen("blocks-scale")].join(), margin: { l: 44, r: 8, t: 8, b: 40 },
        xaxis: axis("Block"), yaxis: axis("", { type: values.length ? blockType(values) : "linear", exponentformat: "power", nticks: 6, rangemode: "tozero" }),
      },
    };
  }));
  const showBlocks = () => {
    showChoices();
    const stack = current();
    if (!stack) return;
    control("newest").textContent = `newest profile, step ${stack.newest.step}`;
    control("first").textContent = `first profile, step ${stack.first.step}`;
    document.querySelector(".key .line").style.borderColor = style(stack.run.id).colour;
    drawBlocks.forEach((draw) => draw());
  };

  // -- alarms --------------------------------------------------------------------------------------------------------
  const showAlarms = () => {
    const found = known.runs.flatMap((run) => known.details.get(run.id).alarms.map((alarm) => [run, alarm]));
    control("no-alarms").hidden = Boolean(found.length);
    control("alarm-table").hidden = !found.length;
    control("alarm-rows").replaceChildren(...found.map(([run, alarm]) => {
      const row = make("tr");
      const what = make("td", alarm.what);
      what.dataset.level = alarm.level;
      const cells = [make("th", run.name, { scope: "row" }), make("td", String(alarm.step), { className: "number" }), what, make("td", alarm.detail)];
      ["Run", "Step", "What", "Detail"].forEach((title, k) => { cells[k].dataset.label = title; });
      row.append(...cells);
      return row;
    }));
  };

  // -- asking --------------------------------------------------------------------------------------------------------
  const take = (answer) => {
    if (answer.epoch !== known.epoch) known.details.clear();
    Object.entries(answer.changed).forEach(([id, detail]) => known.details.set(Number(id), detail));
    Object.assign(known, { epoch: answer.epoch, version: answer.version, runs: answer.runs });
    control("full").hidden = !answer.full;
    showRuns();
    if (!Object.keys(answer.changed).length) return;
    drawLoss();
    showBlocks();
    showAlarms();
  };
  const ask = async () => {
    try {
      const answer = await fetch(`runs.json?epoch=${known.epoch}&since=${known.version}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      take(await answer.json());
      control("lost").hidden = true;
    } catch (error) {
      control("lost").hidden = false;
    }
  };
  const again = async () => {
    // A tab that nobody sees asks nothing.
    if (!document.hidden) await ask();
    setTimeout(again, 1000 * data.seconds);
  };
  document.querySelectorAll("#loss input").forEach((input) => input.addEventListener("change", () => drawLoss()));
  document.querySelectorAll("#blocks input, #blocks select").forEach((input) => input.addEventListener("change", showBlocks));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  again();
  return { known, ask };
})();
