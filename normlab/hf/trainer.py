"""Hugging Face Trainer support: the scheme's parameter groups, and its constraint after every optimiser step.

Trainer(model, args, ..., callbacks=[NormLabCallback()], optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, args))
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from normlab.errors import NormLabError
from normlab.hf.conversion.scheme_rules import rules


class NormLabCallback(TrainerCallback):
    """Trainer callback that re-applies the scheme's constraint, if it has one, after every optimiser step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        rules(model).after_step()


def optimizer_cls_and_kwargs(model: PreTrainedModel, args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Value of the Trainer argument of that name: the optimiser of `args` with the scheme's parameter groups."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    taken = next((name for name in ("params", "model", "optimizer_dict") if name in options), None)
    if taken is not None or not isinstance(kind, type):
        raise NormLabError(f"optim={args.optim!r} makes parameter groups of its own; try optim='adamw_torch'")
    groups = rules(model).param_groups(lr=args.learning_rate, weight_decay=args.weight_decay)
    return kind, {**options, "params": groups}
