"""`normlab.simulate`: simulate tokens through depth under one or several schemes, and fit decay laws to the result.

run = normlab.simulate("peri", tokens=256, dim=512, beta=5)
run.table(), run.run()["cosine"].mean, run.save("peri.json")
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.measure import fits, tails
from normlab.dynamics.measure.clusters import cluster_merges
from normlab.dynamics.progress import ProgressBar
from normlab.dynamics.recording import LawSpec, Recording, law_label, record_laws
from normlab.dynamics.result import Band, FittedLaw, Merge, SchemeRun, Simulation
from normlab.dynamics.system import laws
from normlab.dynamics.system.network import renormalises
from normlab.dynamics.system.weights import Weights, check_weights
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.scheme import Scheme
from normlab.utils.records import to_plain
from normlab.utils.versions import versions


def simulate(
    scheme: LawSpec | Sequence[LawSpec] | None = None,
    *,
    config: SimulateConfig | None = None,
    matrices: Weights | None = None,
    progress: bool = False,
    command: Sequence[str] = (),
    **options: object,
) -> Simulation:
    """Simulate attention dynamics: tokens as particles on a sphere, under one normalisation scheme or several.

        run = normlab.simulate(["post", "peri"], tokens=64, dim=3, beta=4.0)
        run.save("page.html")

    A scheme is given by name, or as a `Scheme` or `Law` object. Options are the fields of `SimulateConfig`: `tokens`,
    `dim`, `beta`, `time`, ... `matrices` are your own weights (`normlab.dynamics.system.weights.fixed_weights`) or
    those of a network (`normlab.dynamics.system.read_weights.read_attention`), used for all systems. With `progress`
    a progress bar is shown on standard error.
    """
    settings = (config or SimulateConfig()).replace(**options)
    _check_no_model(settings)
    specs = _specs(scheme, settings)
    if matrices is not None:
        check_weights(matrices, settings.dim)
    labels = _labels(specs)
    settings = settings.replace(scheme=tuple(labels))
    begin = time.perf_counter()
    with ProgressBar(progress=progress) as display:
        followed = record_laws(settings, specs, matrices=matrices, tell=display)
    drawn, explained = _project_paths([found.paths for found in followed])
    runs = [
        _run(settings, label, found, place, paths, None if matrices else _tail(settings, spec))
        for label, spec, found, paths in zip(labels, specs, followed, drawn, strict=True)
        for place in range(len(settings.beta))
    ]
    return Simulation(
        config=to_plain(settings) | ({"weights": "given"} if matrices else {}),
        runs=tuple(runs),
        explained=explained,
        notes=tuple(_notes(settings, labels, specs)),
        seconds=time.perf_counter() - begin,
        versions=versions(),
        command=tuple(command),
    )


def _check_no_model(config: SimulateConfig) -> None:
    """Raise for options of the experiment real-model: a simulation without it would leave them unread."""
    for name in ("model", "data"):
        value = getattr(config, name)
        if value != getattr(SimulateConfig, name):
            raise NormLabError(f"{name} is an option of real-model; try normlab simulate real-model --{name} {value}")


def _specs(scheme: LawSpec | Sequence[LawSpec] | None, config: SimulateConfig) -> list[LawSpec]:
    """Schemes to simulate; unknown ones raise before anything runs."""
    named = config.scheme if scheme is None else [scheme] if isinstance(scheme, str | Scheme | Law) else scheme
    specs = [each for spec in named for each in (laws.expand_all([spec]) if isinstance(spec, str) else [spec])]
    for spec in specs:
        laws.find_law(spec, config.layers)
    return specs


def _labels(specs: Sequence[LawSpec]) -> list[str]:
    """Names in tables; several `Law` objects, which have no names of their own, are numbered."""
    numbers, several = itertools.count(1), sum(isinstance(spec, Law) for spec in specs) > 1
    return [
        f"{law_label(spec)} {next(numbers)}" if several and isinstance(spec, Law) else law_label(spec) for spec in specs
    ]


def _run(
    config: SimulateConfig,
    label: str,
    found: Recording,
    place: int,
    paths: np.ndarray | None,
    tail: tails.Tail | None,
) -> SchemeRun:
    times = found.times.tolist()
    values = {name: series[:, place] for name, series in found.values.items()}
    counts = values["clusters"][:, 0].tolist() if "clusters" in values else []
    return SchemeRun(
        scheme=label,
        beta=config.beta[place],
        times=tuple(times),
        bands={name: quantile_band(series) for name, series in values.items()},
        histogram=() if found.histogram is None else _rounded(found.histogram[:, place]),
        merges=tuple(
            Merge(time=when, clusters=left) for when, left in (cluster_merges(times, counts) if counts else [])
        ),
        fits=tuple(_fits(config, times, values, tail)),
        tail=tail,
        paths=() if paths is None else _rounded(paths[:, place]),
    )


def quantile_band(series: np.ndarray) -> Band:
    """Mean, 5 % and 95 % quantiles over seeds of an array (times, seeds)."""
    low, high = np.quantile(series, [0.05, 0.95], axis=1)
    return Band(mean=tuple(series.mean(1).tolist()), low=tuple(low.tolist()), high=tuple(high.tolist()))


def _tail(config: SimulateConfig, spec: LawSpec) -> tails.Tail | None:
    """Predicted tail of the variance. The theory covers one softmax head with V = 1, no mask and no MLP."""
    plain = config.weights == "identity" and config.kind == "softmax" and not config.mlp and not config.causal
    return tails.predict_tail(laws.find_law(spec, config.layers)) if plain and config.heads == 1 else None


def _fits(
    config: SimulateConfig, times: Sequence[float], values: dict[str, np.ndarray], tail: tails.Tail | None
) -> list[FittedLaw]:
    found, gathered = [], False
    if "variance" in values:
        floor = fits.variance_floor(config.dtype)
        ends = [_tail_points(times, one.tolist(), floor) for one in values["variance"].T]
        ends = [end for end in ends if end is not None]
        gathered = len(ends) == values["variance"].shape[1]
        if ends:
            # One form for all seeds, or a seed of another form would be left out.
            rates = [fits.fit_rate(*end, tail.form) for end in ends] if tail else fits.fit_best_common_form(ends)
            predicted = tail.rate if tail else None
            found.append(FittedLaw(observable="variance", rate=fits.pool_rates(rates), predicted=predicted))
    if "radius" in values and values["radius"][-1].mean() > 2 * config.radius:
        late = fits.tail_slice(times, values["radius"].mean(1).tolist(), floor=0.0)
        if late.stop > late.start:
            rates = [fits.fit_rate(times[late], one[late].tolist(), "power") for one in values["radius"].T]
            # The tail's growth is that of tokens that have gathered.
            predicted = tail.growth if tail and gathered else None
            found.append(FittedLaw(observable="radius", rate=fits.pool_rates(rates), predicted=predicted))
    return found


def _tail_points(
    times: Sequence[float], values: Sequence[float], floor: float
) -> tuple[Sequence[float], Sequence[float]] | None:
    """Times and values of the tail of one trajectory, None if it has none."""
    # Before the variance has fallen to a tenth there is no tail to fit.
    met = next((place for place, value in enumerate(values) if value < 0.1 * values[0]), len(values))
    times, values = times[met:], values[met:]
    late = fits.tail_slice(times, values, floor=floor)
    return None if late.stop == late.start else (times[late], values[late])


def _project_paths(paths: Sequence[np.ndarray | None]) -> tuple[list[np.ndarray | None], float | None]:
    """Project the paths of all runs on their three principal axes; also return the explained variance."""
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
    """Nested tuples of numbers rounded to four decimals."""
    return _nested(np.round(values.astype(float), 4).tolist())


def _nested(value):
    return tuple(_nested(entry) for entry in value) if isinstance(value, list) else value


def _notes(config: SimulateConfig, labels: Sequence[str], specs: Sequence[LawSpec]) -> list[str]:
    notes = []
    for label, spec in zip(labels, specs, strict=True):
        scheme, note = laws.scheme_of(spec), laws.find_law(spec, config.layers).note
        if note:
            notes.append(f"{label}: {note}")
        if config.radius != 1.0 and config.method != "network" and scheme is not None and renormalises(scheme):
            radius = f"the law carries the radius {config.radius:g} on"
            notes.append(f"{label}: {radius}; its network puts tokens on the unit sphere at once")
    return notes
