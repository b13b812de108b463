"use strict";
// The shell of every NormLab page: the data, colours that follow the theme, plots that redraw, tables that sort.
const NormLab = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const schemes = data.schemes || [];
  const hidden = new Set();
  const plots = [];
  const COLOURS = 7;
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "pentagon", "star", "hexagon"];
  const DASHES = ["solid", "dash", "dashdot", "longdash"];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (k) => css(`--series-${k % COLOURS}`);
  // Colours repeat after seven schemes; the dash then tells them apart.
  const style = (k) => ({ colour: colour(k), symbol: SYMBOLS[k % COLOURS], dash: DASHES[Math.floor(k / COLOURS) % 4] });
  // Plotly reads a little HTML in its labels; a user's text must stay text.
  const text = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const brief = (value, most) => text(value.length > most ? `${value.slice(0, most - 1)}…` : value);
  const narrow = () => matchMedia("(max-width: 40rem)").matches;
  const faded = (hex, share) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r}, ${g}, ${b}, ${share})`;
  };
  const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;
  const rate = (value) => {
    const [mantissa, power] = Number(value).toExponential(3).split("e");
    return `${Number(mantissa)}e${Number(power)}`;
  };

  const axis = (title, more) => ({
    title: { text: title, standoff: 10 }, gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false,
    tickcolor: css("--line"), automargin: true, ...more,
  });
  const layout = (more) => ({
    paper_bgcolor: "rgba(0, 0, 0, 0)", plot_bgcolor: "rgba(0, 0, 0, 0)", showlegend: false, hovermode: "closest",
    font: { family: css("--sans"), size: 13, color: css("--muted") }, margin: { l: 50, r: 12, t: 12, b: 44 },
    modebar: { bgcolor: "rgba(0, 0, 0, 0)", color: css("--muted"), activecolor: css("--ink") },
    hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--line"), font: { color: css("--ink") } },
    // A finger scrolls the page; a mouse zooms the plot.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", ...more,
  });
  const CONFIG = {
    displaylogo: false, responsive: true,
    // Named one by one: plotly's own choice has a button that sends the figure to its makers.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    displayModeBar: matchMedia("(pointer: coarse)").matches ? false : "hover",
  };

  // build() returns {traces, layout}; it is called again whenever what it reads has changed.
  const plot = (id, build) => {
    const element = document.getElementById(id);
    if (!element) return () => {};
    const draw = () => {
      const drawing = build(element);
      return Plotly.react(element, drawing.traces, layout(drawing.layout), CONFIG);
    };
    plots.push(draw);
    draw();
    return draw;
  };
  const redraw = () => {
    paint();
    plots.forEach((draw) => draw());
  };

  const paint = () => {
    document.querySelectorAll(".swatch").forEach((swatch) => {
      swatch.style.background = colour(Number(swatch.dataset.scheme));
    });
    document.querySelectorAll(".legend button").forEach((button) => {
      button.setAttribute("aria-pressed", String(!hidden.has(Number(button.dataset.scheme))));
    });
  };
  const toggle = (k) => {
    if (!hidden.delete(k)) hidden.add(k);
    redraw();
  };
  const legend = (place) => schemes.forEach((scheme, k) => {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
    button.dataset.scheme = swatch.dataset.scheme = k;
    button.append(swatch, scheme.label);
    button.addEventListener("click", () => toggle(k));
    place.append(button);
  });

  const key = (row, column) => {
    const sort = row.cells[column].dataset.sort;
    if (sort === undefined) return null;
    return sort !== "" && Number.isFinite(Number(sort)) ? Number(sort) : sort;
  };
  // What has no value stays at the end in either direction.
  const compare = (a, b, sign) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === typeof b && typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
  };
  const sort = (table, heading) => {
    const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    table.querySelectorAll("thead th").forEach((other) => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => compare(key(a, heading.cellIndex), key(b, heading.cellIndex), sign));
    body.append(...rows);
  };

  if (schemes.length > 1) document.querySelectorAll(".legend").forEach(legend);
  // On a phone the plot comes first and its options wait behind their heading.
  document.querySelectorAll(".options").forEach((options) => { options.open = !narrow(); });
  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("thead button").forEach((button) => {
      button.addEventListener("click", () => sort(table, button.closest("th")));
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is light, whatever the screen was.
  const theme = (name) => {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    redraw();
  };
  addEventListener("beforeprint", () => theme("light"));
  addEventListener("afterprint", () => theme(null));
  paint();

  return { data, schemes, hidden, style, colour, css, text, brief, narrow, faded, chosen, rate, axis, plot };
})();
