"use strict";
// Tokens on spheres that play in step: one clock for all, one view for all, drawn on plain canvases.
const Stage = (() => {
  const { data, hidden, colour, css } = NormLab;
  const stage = document.getElementById("stage");
  const runs = data.runs;
  const times = runs[0].times;
  const last = times.length - 1;
  const boxes = [...stage.querySelectorAll(".sphere")];
  const listeners = [];
  const control = (id) => document.getElementById(id);
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const UPRIGHT = data.flat ? { turn: 0, tilt: 0 } : { turn: -0.9, tilt: 0.35 };
  const WHOLE = 12; // seconds from the first look to the last at speed 1
  const TRAIL = 14; // looks
  const PAUSE = 1500; // milliseconds that the opening stands before it plays by itself
  // `showing`: it plays by itself, once, and then goes back to where it opened.
  let at = data.opening, playing = false, showing = false, before = 0, queued = false, view = { ...UPRIGHT };

  const time = () => {
    const low = Math.floor(at), high = Math.min(low + 1, last);
    return times[low] + (times[high] - times[low]) * (at - low);
  };
  const words = (value) => (value === 0 ? "0" : value >= 1e5 || value < 1e-2 ? NormLab.rate(value) : String(Number(value.toPrecision(3))));

  // Turn about the upright axis, then tilt towards the eye; z comes out of the screen.
  const turned = (x, y, z) => {
    const c = Math.cos(view.turn), s = Math.sin(view.turn), k = Math.cos(view.tilt), l = Math.sin(view.tilt);
    const [across, depth] = data.flat ? [x, z] : [c * x + s * z, c * z - s * x];
    return [across, k * y - l * depth, k * depth + l * y];
  };
  const ring = (point) => Array.from({ length: 61 }, (_, i) => point((i / 30) * Math.PI));
  const circles = data.flat ? [] : [
    ...[0, 1, 2, 3, 4, 5].map((k) => ring((a) => [Math.cos(a) * Math.cos(k * Math.PI / 6), Math.sin(a), Math.cos(a) * Math.sin(k * Math.PI / 6)])),
    ...[-2, -1, 0, 1, 2].map((k) => ring((a) => [Math.cos(k * Math.PI / 6) * Math.cos(a), Math.sin(k * Math.PI / 6), Math.cos(k * Math.PI / 6) * Math.sin(a)])),
  ];
  const drawGlobe = (pen, size, middle) => {
    const shade = pen.createRadialGradient(middle - size / 3, middle - size / 3, size / 10, middle, middle, size);
    shade.addColorStop(0, css("--surface"));
    shade.addColorStop(1, css("--grid"));
    pen.beginPath();
    pen.arc(middle, middle, size, 0, 2 * Math.PI);
    pen.fillStyle = shade;
    if (!data.flat) pen.fill();
    pen.strokeStyle = css("--line");
    pen.lineWidth = 1.2;
    pen.stroke();
    pen.lineWidth = 0.8;
    circles.forEach((circle) => [0.35, 1].forEach((strength, front) => {
      pen.globalAlpha = strength;
      pen.beginPath();
      let down = false;
      circle.forEach((point) => {
        const [x, y, z] = turned(...point);
        const shown = (z >= 0) === Boolean(front);
        if (shown && down) pen.lineTo(middle + size * x, middle - size * y);
        else if (shown) pen.moveTo(middle + size * x, middle - size * y);
        down = shown;
      });
      pen.stroke();
    }));
    pen.globalAlpha = 1;
  };

  // Between looks, which are close together, tokens go straight on.
  const place = (paths, moment, token) => {
    const low = Math.floor(moment), high = Math.min(low + 1, last), share = moment - low;
    return turned(...[0, 1, 2].map((axis) => {
      const a = paths[low][3 * token + axis], b = paths[high][3 * token + axis];
      return (a + (b - a) * share) / data.fine;
    }));
  };
  const drawTrails = (pen, run, ink, size, middle) => {
    const count = run.paths[0].length / 3;
    const first = Math.max(0, Math.ceil(at - TRAIL));
    pen.lineWidth = 1.4;
    pen.strokeStyle = ink;
    for (let look = first; look < at; look += 1) {
      pen.globalAlpha = 0.5 * (1 - (at - look) / (TRAIL + 1));
      pen.beginPath();
      for (let token = 0; token < count; token += 1) {
        const [x, y] = place(run.paths, look, token);
        const [u, v] = place(run.paths, Math.min(look + 1, at), token);
        pen.moveTo(middle + size * x, middle - size * y);
        pen.lineTo(middle + size * u, middle - size * v);
      }
      pen.stroke();
    }
    pen.globalAlpha = 1;
  };
  const drawTokens = (pen, run, ink, size, middle) => {
    const dot = Math.max(2.2, size / 38);
    const tokens = Array.from({ length: run.paths[0].length / 3 }, (_, token) => place(run.paths, at, token));
    tokens.sort((a, b) => a[2] - b[2]);
    pen.lineWidth = 1;
    pen.strokeStyle = css("--surface");
    pen.fillStyle = ink;
    tokens.forEach(([x, y, z]) => {
      const near = data.flat ? 1 : (z + 1) / 2;
      pen.globalAlpha = 0.3 + 0.7 * near;
      pen.beginPath();
      pen.arc(middle + size * x, middle - size * y, dot * (0.7 + 0.5 * near), 0, 2 * Math.PI);
      pen.fill();
      if (near > 0.5) pen.stroke();
    });
    pen.globalAlpha = 1;
  };
  const near = () => Math.round(at);
  const drawBox = (box) => {
    const k = Number(box.dataset.run);
    box.hidden = hidden.has(k);
    if (box.hidden) return;
    const canvas = box.querySelector("canvas");
    const width = canvas.clientWidth, grain = Math.min(devicePixelRatio || 1, 2);
    if (canvas.width !== Math.round(width * grain)) canvas.width = canvas.height = Math.round(width * grain);
    const pen = canvas.getContext("2d");
    pen.setTransform(grain, 0, 0, grain, 0, 0);
    pen.clearRect(0, 0, width, width);
    const middle = width / 2, size = middle * 0.93;
    drawGlobe(pen, size, middle);
    if (NormLab.chosen("trails") !== "off") drawTrails(pen, runs[k], colour(k), size, middle);
    drawTokens(pen, runs[k], colour(k), size, middle);
    const { cosine, clusters } = runs[k].bands;
    box.querySelector(".now").textContent = [
      cosine && `mean cosine ${(cosine.mean[near()] ?? NaN).toFixed(3)}`,
      clusters && `${Math.round(clusters.mean[near()])} cluster${clusters.mean[near()] === 1 ? "" : "s"}`,
    ].filter(Boolean).join(" · ");
  };
  const draw = () => {
    queued = false;
    boxes.forEach(drawBox);
    if (!boxes.length) return;
    control("scrub").value = at;
    control("clock").textContent = `layer ${words(time())}`;
    control("scrub").setAttribute("aria-valuetext", `layer ${words(time())}`);
    control("where").textContent = at === data.opening && !playing ? data.opened : "";
    listeners.forEach((listen) => listen(time()));
  };
  const refresh = () => {
    if (!queued) requestAnimationFrame(draw);
    queued = true;
  };

  const go = (look) => {
    at = Math.max(0, Math.min(last, look));
    refresh();
  };
  const tick = (now) => {
    if (!playing) return;
    // A frame's own time may lie before the click that started it; a tab in the background must not jump.
    const passed = Math.max(0, Math.min(now - before, 100)) / 1000;
    at += passed * (last / WHOLE) * Number(control("pace").value);
    before = now;
    if (at >= last) {
      at = showing ? data.opening : last;
      play(false);
    }
    draw();
    if (playing) requestAnimationFrame(tick);
  };
  const play = (wanted) => {
    // From the start, unless its reader has gone to a moment of their own.
    if (wanted && (at >= last || at === data.opening)) at = 0;
    playing = wanted;
    showing = false;
    control("play").textContent = playing ? "Pause" : "Play";
    before = performance.now();
    if (playing) requestAnimationFrame(tick);
  };
  const turn = (across, up) => {
    if (data.flat) return;
    view = { turn: view.turn + across, tilt: Math.max(-1.5, Math.min(1.5, view.tilt + up)) };
    refresh();
  };

  const drag = (canvas) => {
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      from = [event.clientX, event.clientY];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) return;
      turn((event.clientX - from[0]) / 120, (event.clientY - from[1]) / 120);
      from = [event.clientX, event.clientY];
    });
    ["pointerup", "pointercancel"].forEach((name) => canvas.addEventListener(name, () => { from = null; }));
  };
  const press = (event) => {
    const radio = event.target.matches("input[type=radio], select");
    const keys = {
      ArrowLeft: () => (event.shiftKey ? turn(-0.15, 0) : step(-1)), ArrowRight: () => (event.shiftKey ? turn(0.15, 0) : step(1)),
      ArrowUp: () => turn(0, -0.15), ArrowDown: () => turn(0, 0.15), Home: () => step(-Infinity), End: () => step(Infinity),
      " ": () => play(!playing),
    };
    const upright = ["ArrowUp", "ArrowDown"].includes(event.key) && !event.shiftKey;
    const button = event.key === " " && event.target.matches("button");
    if (!keys[event.key] || radio || button || upright || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  };
  const step = (by) => {
    play(false);
    go(Number.isFinite(by) ? (by > 0 ? Math.floor(at + 1e-6) : Math.ceil(at - 1e-6)) + by : by);
  };
  const seek = (wanted) => {
    const high = times.findIndex((moment) => moment >= wanted);
    if (high <= 0) return go(high < 0 ? last : 0);
    return go(high - (times[high] - wanted) / (times[high] - times[high - 1]));
  };
  const drawTicks = () => {
    const ticks = stage.querySelector(".ticks");
    ticks.replaceChildren(...runs.flatMap((run, k) => (hidden.has(k) ? [] : run.merges.map((moment) => {
      const tick = document.createElement("i");
      tick.style.left = `${(100 * times.indexOf(moment)) / last}%`;
      tick.style.background = colour(k);
      return tick;
    }))));
  };

  if (boxes.length) {
    stage.tabIndex = 0;
    stage.setAttribute("aria-label", "Moving tokens");
    stage.toggleAttribute("data-flat", data.flat);
    stage.addEventListener("keydown", press);
    boxes.forEach((box) => drag(box.querySelector("canvas")));
    control("play").addEventListener("click", () => play(!playing));
    control("scrub").addEventListener("input", () => {
      play(false);
      go(Number(control("scrub").value));
    });
    control("upright")?.addEventListener("click", () => {
      view = { ...UPRIGHT };
      refresh();
    });
    stage.querySelectorAll("input[name=trails]").forEach((input) => input.addEventListener("change", refresh));
    document.addEventListener("click", (event) => {
      if (!event.target.closest(".legend")) return;
      drawTicks();
      refresh();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      drawTicks();
      refresh();
    });
    new ResizeObserver(refresh).observe(stage);
    drawTicks();
    draw();
    // The first time that it comes into sight it plays, once, unless its reader wants no motion or has taken over.
    const showOnce = () => {
      if (playing || at !== data.opening) return;
      at = 0;
      play(true);
      showing = true;
    };
    const sight = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      sight.disconnect();
      const soon = setTimeout(showOnce, PAUSE);
      ["pointerdown", "keydown"].forEach((name) => stage.addEventListener(name, () => clearTimeout(soon), { once: true }));
    }, { threshold: 0.6 });
    if (!calm) sight.observe(boxes[0]);
  }
  const onMove = (listen) => {
    listeners.push(listen);
    if (boxes.length) listen(time());
  };
  return { onMove, seek, time, view: () => ({ ...view, at, playing }) };
})();
