"""ladder.json: the configuration and design of a ladder's folder; a call with another configuration is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.compare.store import Row
from normlab.compare.tuning import RateResults
from normlab.errors import NormLabError
from normlab.ladders.config import LadderConfig
from normlab.ladders.places import target_places
from normlab.ladders.plan import LadderPlan
from normlab.ladders.rates import FoundRate, Search
from normlab.ladders.report.design import (
    CellFacts,
    LadderDesign,
    LostRun,
    RateRule,
    RateSearchFacts,
    SizeFacts,
    TriedRate,
)
from normlab.ladders.size import Size
from normlab.ladders.statistics.answer import Place, place_name
from normlab.ladders.stored_rows import run_state
from normlab.models.config import TransformerConfig
from normlab.pages.numbers import rate
from normlab.train.config import LATER_DEFAULTS, not_decisive
from normlab.train.hardware import describe
from normlab.train.monitor.stuck import end_of_stuck
from normlab.train.tasks import Data
from normlab.utils.files import read_json, write_json
from normlab.utils.records import from_plain
from normlab.utils.results_folder import LADDER
from normlab.utils.versions import versions

_MAY_GROW = ("schemes", "small_schemes")
_MAY_RISE = ("seeds", "top_seeds")
_FREE = ("target", "level", "epochs")
"""Options that change the answer or the permission to run, but no run."""


@dataclass(frozen=True)
class Description:
    """The content of ladder.json."""

    baseline: str
    level: float
    targets: list[Place]
    design: LadderDesign


def write_description(folder: Path, config: LadderConfig, data: Data, design: LadderDesign) -> None:
    """Write ladder.json; raise if the folder has rows of another configuration."""
    path = folder / LADDER
    new = {
        "config": config.to_dict(), "corpus": data.facts(), "design": design.to_dict(),
        "targets": [place.to_dict() for place in target_places(config)],
    }  # fmt: skip
    if path.is_file() and (folder / "rows.jsonl").is_file() and (wrong := _fault(read_json(path), new)):
        raise NormLabError(f"{folder} holds another ladder: {wrong}; choose another folder, or remove this one")
    write_json(path, new)


def read_description(folder: Path) -> Description:
    """Read ladder.json."""
    record = read_json(folder / LADDER)
    try:
        config, targets = record["config"], from_plain(list[Place], record["targets"], LADDER)
        return Description(config["baseline"], config["level"], targets, LadderDesign.from_dict(record["design"]))
    except (KeyError, TypeError):
        raise NormLabError(
            f"{folder / LADDER} is not the description of a ladder; expected a folder of normlab ladder"
        ) from None


def design_of(plan: LadderPlan, rows: Sequence[Row], data: Data, command: Sequence[str]) -> LadderDesign:
    """What was run, and what the rows say of rates and lost runs."""
    config, known = plan.config, versions()
    unique = data.facts()["train"]["tokens"]
    held_out = next((str(rung.size) for rung in config.rungs if rung.is_held_out), None)
    found, work, set_aside = plan.rates.found(rows), plan.work(rows), plan.set_aside(rows)
    cells = [config.run(rung, config.baseline_name, budget, 1e-3, 0) for rung in config.rungs
             for budget in rung.budgets]  # fmt: skip
    return LadderDesign(
        command=tuple(command), date=_first_date(rows), commit=known.get("commit"), device=_device(rows),
        versions=known, data=data.describe() if hasattr(data, "describe") else None, unique_tokens=unique,
        head="tied" if getattr(cells[0].model, "tied_head", False) else "own",
        sizes=tuple(_size_facts(config, size) for size in config.all_sizes),
        budgets=tuple(sorted({cell.tokens_in_all for cell in cells})),
        cells=tuple(
            CellFacts(
                size=f"{cell.model.depth}x{cell.model.dim}", tokens=cell.tokens_in_all, steps=cell.steps,
                epochs=cell.tokens_in_all / unique, batch=cell.batch * cell.sequence,
            )
            for cell in cells
        ),
        rates=tuple(
            _rates(config, name, search) for name, own in plan.rates.searches(rows).items() for search in own
        ),
        rules=tuple(_rule(config, name, found.get(name), plan.rates.side) for name in config.names),
        held_out=held_out, runs_left=work.runs - work.ended, set_aside=tuple(sorted(set_aside)),
        lost=tuple(
            _lost(row, config.base.task_object.metric.guess)
            for row in rows
            if _is_lost(row) and row["run"] not in set_aside
        ),
        cautions=tuple(_untried_rates(plan, found)),
    )  # fmt: skip


def _size_facts(config: LadderConfig, size: Size) -> SizeFacts:
    model = config.models[size][config.baseline_name]
    return SizeFacts(
        label=str(size), depth=size.depth, width=size.width, parameters=model.num_params(),
        embedding_share=embedding_share(model), flops_per_token=model.flops_per_token(config.base.sequence),
        seeds=config.rung(size).seeds,
    )  # fmt: skip


def embedding_share(model: TransformerConfig) -> float:
    """Share of the parameters in the embedding and the head."""
    tables = 1 if getattr(model, "tied_head", False) else 2
    return tables * model.answers * model.dim / model.num_params()


def _rates(config: LadderConfig, scheme: str, search: Search) -> RateSearchFacts:
    edges = {"lowest": "smallest", "highest": "largest"}
    return RateSearchFacts(
        # In whole steps, as the cells: one place has one name on the page.
        scheme=scheme, size=str(search.rung.size),
        tokens=config.run(search.rung, scheme, search.budget, 1e-3, 0).tokens_in_all,
        tried=tuple(_tried(lr, own, search.confirmed.get(lr)) for lr, own in search.tried.items()), pick=search.pick,
        edge=edges.get(search.end or ""),  # type: ignore[arg-type]  # the two literals of Edge
    )  # fmt: skip


def _tried(lr: float, own: RateResults, more: RateResults | None) -> TriedRate:
    if own.trained:
        trained, lost = (len(more.trained), more.lost) if more else (0, 0)
        return TriedRate(lr=lr, loss=own.trained[0], confirmed=trained, unconfirmed=lost)
    return TriedRate(lr=lr, loss=next(iter(own.stuck.values()), None), state="stuck" if own.stuck else "failed")


def _rule(config: LadderConfig, scheme: str, found: FoundRate | None, side: str) -> RateRule:
    notes = {
        "confirmed": "best rates at the middle size are within a factor of √2",
        "corrected": f"at the middle size other rates were best; rates follow {side}^{found.power if found else 0:.2f}",
        "untested": "not tested at another size",
    }
    verdict = found.verdict if found else "untested"
    basis = "fitted" if verdict == "corrected" else _basis(config, scheme)
    return RateRule(scheme=scheme, carry=config.carry, basis=basis, note=notes[verdict])


def _basis(config: LadderConfig, scheme: str) -> str:
    """Whether the rule that carries a scheme's rate is derived for every way in which the sizes differ."""
    if config.carry == "none":
        return "hypothesis"
    if config.carry == "width+depth":
        return config.models[config.all_sizes[0]][scheme].scheme_object.depth_transfer
    depths = sorted(size.depth for size in config.all_sizes)
    if depths[0] == depths[-1]:
        return "derived"
    return f"derived over width; depth {depths[0]} to {depths[-1]} without a rule: a hypothesis"


def _untried_rates(plan: LadderPlan, found: Mapping[str, FoundRate]) -> Iterator[str]:
    """A caution for each scheme that is trained at a rate beyond those that were tried for it."""
    for name, own in found.items():
        if outside := plan.rates.sizes_outside(own):
            tried = sorted(lr for search in own.searches for lr in search.tried)
            where = ", ".join(f"{size} ({rate(lr)})" for size, lr in outside.items())
            yield (
                f"The rate of {name} at {where} lies outside of all that were tried for it "
                f"({rate(tried[0])} to {rate(tried[-1])})."
            )


def _is_lost(row: Mapping[str, Any]) -> bool:
    return row["role"] == "judge" and run_state(row) != "done"


def _lost(row: Mapping[str, Any], guess: str) -> LostRun:
    """`guess`: what a stuck run is no better than; one that is found so at its end has no reason of its own."""
    name = f"{row['scheme']}, {place_name(row['size'], row['budget'])}, seed {row['seed']}"
    reason, entropy = row["reason"] or "", row.get("unigram_entropy")
    if not reason and row.get("stuck") and entropy is not None and row["loss"] is not None:
        reason = end_of_stuck(guess, entropy, row["loss"], row.get("stuck_at"), row["steps"])
    return LostRun(name=name, state=run_state(row), reason=reason)


def _first_date(rows: Sequence[Mapping[str, Any]]) -> str | None:
    return min((row["started"] for row in rows), default=None)


def _device(rows: Sequence[Mapping[str, Any]]) -> str:
    import torch

    found = list(dict.fromkeys(row["device"] for row in rows))
    return ", ".join(found) if found else describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _fault(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first difference by which `new` is neither equal to `old` nor an extension of it; None if there is none."""
    try:
        before, after = dict(old["config"]), dict(new["config"])
        for name in _MAY_GROW:
            missing = [value for value in before.pop(name) if value not in after[name]]
            if missing:
                return f"its {name} have {missing[0]}, which is not among those given (they can grow, but not shrink)"
        for name in _MAY_RISE:
            # Without a number of its own the largest size has as many as the others.
            was, given = (side[name] or side["seeds"] for side in (old["config"], after))
            if given < was:
                return f"its {name} is {was}, not {given} (it can grow, but not shrink)"
        if old["corpus"]["fingerprint"] != new["corpus"]["fingerprint"]:
            return "its data has changed since it began"
        return _changed(before, after)
    except (KeyError, TypeError, AttributeError):
        return f"its {LADDER} cannot be read"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    flat = [{**LATER_DEFAULTS, **side["base"], **side["base"]["model"], **side} for side in (before, after)]
    skipped = {*_MAY_GROW, *_MAY_RISE, *_FREE, *not_decisive(after["base"]["trouble"]), "base", "model"}
    for name, value in flat[1].items():
        if name not in skipped and flat[0].get(name) != value:
            return f"its {name} is {flat[0].get(name)!r}, not {value!r}"
    return None
