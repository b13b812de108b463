"""Simulation: what a scheme does to tokens through depth.

run = normlab.simulate("peri", tokens=256, dim=512, beta=5)
run.table(), run.run()["cosine"].mean, run.save("peri.json")
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.measure import fits, tails
from normlab.dynamics.measure.clusters import merges
from normlab.dynamics.recording import Recording, Spec, label, records
from normlab.dynamics.result import Band, Fitted, Merge, SchemeRun, Simulation
from normlab.dynamics.system import laws
from normlab.dynamics.system.network import renormalises
from normlab.dynamics.system.weights import Weights, check_fit
from normlab.dynamics.view.progress import Progress
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.scheme import Scheme
from normlab.utils.records import to_plain
from normlab.utils.versions import versions


def simulate(
    scheme: Spec | Sequence[Spec] | None = None,
    *,
    config: SimulateConfig | None = None,
    matrices: Weights | None = None,
    progress: bool = False,
    command: Sequence[str] = (),
    **options: object,
) -> Simulation:
    """Follow one scheme or several from the same tokens.

    A scheme is named, or is a `Scheme` or a `Law` itself. Options are the fields of `SimulateConfig`: `tokens`, `dim`,
    `beta`, `time`, ... `matrices` are weights of your own (`normlab.dynamics.system.weights.given`) or those of a
    network (`normlab.dynamics.system.read_weights.read`), for all systems. With `progress` a bar is
    shown on standard error.
    """
    settings = (config or SimulateConfig()).replace(**options)
    specs = _specs(scheme, settings)
    if matrices is not None:
        check_fit(matrices, settings.dim)
    settings = settings.replace(scheme=tuple(label(spec) for spec in specs))
    begin = time.perf_counter()
    with Progress(progress=progress) as display:
        followed = records(settings, specs, matrices=matrices, tell=display)
    drawn, explained = _drawn([found.paths for found in followed])
    runs = [
        _run(settings, spec, found, place, paths, None if matrices else _tail(settings, spec))
        for spec, found, paths in zip(specs, followed, drawn, strict=True)
        for place in range(len(settings.beta))
    ]
    return Simulation(
        config=to_plain(settings) | ({"weights": "given"} if matrices else {}),
        runs=tuple(runs),
        explained=explained,
        notes=tuple(_notes(settings, specs)),
        seconds=time.perf_counter() - begin,
        versions=versions(),
        command=tuple(command),
    )


def _specs(scheme: Spec | Sequence[Spec] | None, config: SimulateConfig) -> list[Spec]:
    """What to simulate; what does not exist is refused before anything runs."""
    named = config.scheme if scheme is None else [scheme] if isinstance(scheme, str | Scheme | Law) else scheme
    for spec in named:
        laws.find(spec, config.layers)
    return list(named)


def _run(
    config: SimulateConfig, spec: Spec, found: Recording, place: int, paths: np.ndarray | None, tail: tails.Tail | None
) -> SchemeRun:
    times = found.times.tolist()
    values = {name: series[:, place] for name, series in found.values.items()}
    counts = values["clusters"][:, 0].tolist() if "clusters" in values else []
    return SchemeRun(
        scheme=label(spec),
        beta=config.beta[place],
        times=tuple(times),
        bands={name: band(series) for name, series in values.items()},
        histogram=() if found.histogram is None else _rounded(found.histogram[:, place]),
        merges=tuple(Merge(time=when, clusters=left) for when, left in (merges(times, counts) if counts else [])),
        fits=tuple(_fits(config, times, values, tail)),
        tail=tail,
        paths=() if paths is None else _rounded(paths[:, place]),
    )


def band(series: np.ndarray) -> Band:
    """Mean and middle 90 % over seeds of (looks, seeds)."""
    low, high = np.quantile(series, [0.05, 0.95], axis=1)
    return Band(mean=tuple(series.mean(1).tolist()), low=tuple(low.tolist()), high=tuple(high.tolist()))


def _tail(config: SimulateConfig, spec: Spec) -> tails.Tail | None:
    """Theory speaks of softmax attention with V = 1 and no MLP; a causal mask changes the rates."""
    plain = config.weights == "identity" and config.kind == "softmax" and not config.mlp and not config.causal
    return tails.predict(laws.find(spec, config.layers)) if plain and config.heads == 1 else None


def _fits(
    config: SimulateConfig, times: Sequence[float], values: dict[str, np.ndarray], tail: tails.Tail | None
) -> list[Fitted]:
    found = []
    if "variance" in values:
        floor = fits.floor_of(config.dtype)
        rates = [_tail_rate(times, one.tolist(), floor, tail) for one in values["variance"].T]
        rates = [rate for rate in rates if rate is not None]
        alike = [rate for rate in rates if rate.form == rates[0].form]
        if alike:
            predicted = tail.rate if tail and tail.form == alike[0].form else None
            found.append(Fitted(observable="variance", rate=fits.pooled(alike), predicted=predicted))
    if "radius" in values and values["radius"][-1].mean() > 2 * config.radius:
        late = fits.tail(times, values["radius"].mean(1).tolist(), floor=0.0)
        if late.stop > late.start:
            rates = [fits.fit(times[late], one[late].tolist(), "power") for one in values["radius"].T]
            found.append(Fitted(observable="radius", rate=fits.pooled(rates), predicted=tail.growth if tail else None))
    return found


def _tail_rate(times: Sequence[float], values: Sequence[float], floor: float, tail: tails.Tail | None):
    """The rate of one orbit's tail, in the form that theory names, or in the one that fits best."""
    # Tokens that have not begun to meet have no tail yet.
    met = next((place for place, value in enumerate(values) if value < 0.1 * values[0]), len(values))
    times, values = times[met:], values[met:]
    late = fits.tail(times, values, floor=floor)
    if late.stop == late.start:
        return None
    if tail is None:
        return fits.best(times[late], values[late])
    return fits.fit(times[late], values[late], tail.form)


def _drawn(paths: Sequence[np.ndarray | None]) -> tuple[list[np.ndarray | None], float | None]:
    """Paths of all runs on the three axes that hold most of them, and the share that they hold."""
    given = [path for path in paths if path is not None]
    if not given:
        return list(paths), None
    dim = given[0].shape[-1]
    if dim <= 3:
        return [np.pad(path, [(0, 0)] * 3 + [(0, 3 - dim)]) for path in given], 1.0
    rows = [path.reshape(-1, dim) for path in given]
    spectrum, axes = np.linalg.eigh(np.sum([row.T @ row for row in rows], axis=0, dtype=np.float64))
    return [path @ axes[:, :-4:-1].astype(np.float32) for path in given], float(spectrum[-3:].sum() / spectrum.sum())


def _rounded(values: np.ndarray) -> tuple:
    """Nested tuples of numbers with four decimals: for drawing."""
    return _nested(np.round(values.astype(float), 4).tolist())


def _nested(value):
    return tuple(_nested(entry) for entry in value) if isinstance(value, list) else value


def _notes(config: SimulateConfig, specs: Sequence[Spec]) -> list[str]:
    notes = []
    for spec in specs:
        scheme, note = laws.scheme_of(spec), laws.find(spec, config.layers).note
        if note:
            notes.append(f"{label(spec)}: {note}")
        if config.radius != 1.0 and config.method != "network" and scheme is not None and renormalises(scheme):
            radius = f"the law carries the radius {config.radius:g} on"
            notes.append(f"{label(spec)}: {radius}; its network puts tokens on the unit sphere at once")
    return notes
