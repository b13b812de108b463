"use strict";
// The figures of an experiment: curves with bands, images with curves on them.
(() => {
  const { data, hidden, style, css, text, faded, axis, plot } = NormLab;
  const bundle = data.schemes.length === 0;

  const look = (curve, place, { onImage, marked }) => {
    if (curve.role === "model") return { color: css("--ink"), width: 3 };
    if (onImage) return { color: "#ffffff", width: 2.4, dash: "dash" };
    const own = curve.group === null ? null : style(curve.group);
    if (curve.role === "theory") return { color: own && marked ? own.colour : css("--ink"), width: 1.8, dash: "dash" };
    if (bundle) return { color: faded(style(place).colour, 0.7), width: 1.3 };
    return { color: own.colour, width: 2.2, dash: own.dash };
  };
  const line = (curve, place, where) => ({
    x: curve.x, y: curve.y, mode: curve.marks ? "markers" : "lines", line: look(curve, place, where),
    marker: { color: look(curve, place, where).color, symbol: style(curve.group ?? place).symbol, size: 5 }, connectgaps: false, name: text(curve.name),
    meta: { group: curve.group, part: curve.role }, hovertemplate: `${text(curve.name)}: %{x:.4g}, %{y:.5g}<extra></extra>`,
  });
  // A dark line under the bright one shows it on any colour.
  const halo = (curve) => ({
    x: curve.x, y: curve.y, mode: "lines", line: { color: "rgba(0, 0, 0, 0.55)", width: 4.6 }, hoverinfo: "skip", meta: { part: "halo" },
  });
  const band = (curve, place) => ({
    x: [...curve.x, ...[...curve.x].reverse()], y: [...curve.high, ...[...curve.low].reverse()], mode: "lines", line: { width: 0 },
    fill: "toself", fillcolor: faded(style(curve.group ?? place).colour, 0.16), hoverinfo: "skip", meta: { group: curve.group, part: "band" },
  });
  const heat = (image) => ({
    type: "heatmap", x: image.x, y: image.y, z: image.z, colorscale: "Viridis", zmin: 0, zmax: 1,
    ...(image.z.flat().some((value) => value !== null && (value < 0 || value > 1)) ? { zmin: undefined, zmax: undefined } : {}),
    colorbar: { thickness: 10, outlinewidth: 0, title: { text: text(image.label), side: "right" } }, meta: { part: "image" },
    hovertemplate: "%{x:.4g}, %{y:.4g}: %{z:.4g}<extra></extra>",
  });
  const draw = (figure) => () => {
    const curves = figure.curves.filter((curve) => curve.group === null || !hidden.has(curve.group));
    const bands = curves.map((curve, k) => [curve, k]).filter(([curve]) => curve.low.length && !curve.marks).map(([curve, k]) => band(curve, k));
    // Over points a line of their colour is seen, over a line it is not.
    const where = { onImage: Boolean(figure.image), marked: curves.some((curve) => curve.marks) };
    const lines = curves.flatMap((curve, k) => [...(figure.image ? [halo(curve)] : []), line(curve, k, where)]);
    const side = ({ title, log }) => axis(text(title), { type: log ? "log" : "linear", exponentformat: "power", nticks: 7 });
    return { traces: [...(figure.image ? [heat(figure.image)] : []), ...bands, ...lines], layout: { xaxis: side(figure.x), yaxis: side(figure.y) } };
  };
  data.figures.forEach((figure, k) => plot(`plot-figure-${k}`, draw(figure)));
})();
