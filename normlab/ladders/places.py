"""Places of a ladder for its statistics: the cells of a rung, and the targets beyond the ladder."""

from __future__ import annotations

from normlab.errors import NormLabError
from normlab.ladders.config import LadderConfig
from normlab.ladders.rung import Rung
from normlab.ladders.size import Size
from normlab.ladders.statistics.answer import Place, place_name
from normlab.models.config import TransformerConfig


def places(config: LadderConfig, rung: Rung) -> list[Place]:
    """The cells of a rung, by budget."""
    model = config.models[rung.size][config.baseline_name]
    runs = [config.run(rung, config.baseline_name, budget, 1e-3, 0) for budget in rung.budgets]
    return [_place(config, rung.size, model, run.tokens_in_all, run.steps) for run in runs]


def target_places(config: LadderConfig) -> list[Place]:
    """The sizes and budgets that are too large to try; raises for one that is not."""
    top = max((place for rung in config.rungs for place in places(config, rung)), key=lambda place: place.flops)
    found = [
        _place(config, target.size, config.models_at(target.size)[config.baseline_name], target.tokens)
        for target in config.all_targets
    ]
    for target in found:
        check_beyond(target, top.flops, top.name)
    return found


def check_beyond(target: Place, flops: float, top: str) -> None:
    """Raise if a target has no more compute than the top of the ladder, where the ladder itself is the answer."""
    if target.flops <= flops:
        raise NormLabError(
            f"target {target.name} has {target.flops / flops:.2g} times the compute of {top}, the top of the ladder; "
            "a target lies beyond it, and its cells say what the gap is below: name a larger one, or none"
        )


def _place(config: LadderConfig, size: Size, model: TransformerConfig, tokens: int, steps: int | None = None) -> Place:
    return Place(
        name=place_name(str(size), tokens), size=str(size), parameters=model.num_params(), tokens=tokens,
        flops=float(tokens * model.flops_per_token(config.base.sequence)), steps=steps,
    )  # fmt: skip
