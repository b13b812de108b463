"""Guess the inputs of a module that came without a batch, from its layers and its output."""

from __future__ import annotations

import torch
from torch import nn

from normlab.errors import NormLabError, in_one_line
from normlab.models.transformer import Transformer
from normlab.probes.untouched import untouched
from normlab.targets.data import TokenData, token_data
from normlab.targets.own_tasks import own_task, spare_tokens
from normlab.targets.tasks import Logits, States, TokenTask, Workload, answer

_ASK = "pass batch= and loss_fn=, or have the factory return (module, batch, loss_fn)"


def guess_task(model: nn.Module, name: str, *, data: str, vocabulary: int, length: int, batch_size: int) -> Workload:
    """Guess a module's task: token ids if it has an embedding, vectors if it begins with a norm or linear layer."""
    options = {"length": length, "batch_size": batch_size}
    rows = embedding_rows(model)
    if isinstance(model, Transformer):
        # An encoder needs one of its tokens to hide others behind.
        room = vocabulary if rows is None else rows - spare_tokens(model)
        return own_task(model, _fitting(token_data(data, vocabulary=min(vocabulary, room)), room, name), **options)
    if rows is None:
        return States(token_data(data, vocabulary=vocabulary), embedding=_input_width(model, name), **options)
    tokens = _fitting(token_data(data, vocabulary=min(vocabulary, rows)), rows, name)
    states = States(tokens, **options)
    return Logits(tokens, **options) if _answers(model, name, states) == rows else states


def embedding_rows(model: nn.Module) -> int | None:
    """Number of rows of a module's input embedding, or else of its first embedding."""
    named = getattr(model, "get_input_embeddings", lambda: None)()
    found = [named, *model.modules()]
    return next((module.num_embeddings for module in found if isinstance(module, nn.Embedding)), None)


def notes_on(model: nn.Module, task: Workload) -> tuple[str, ...]:
    """A warning if most of a module's vocabulary does not occur in the data."""
    rows = embedding_rows(model)
    if not isinstance(task, TokenTask) or rows is None or rows < 4 * task.data.vocabulary:
        return ()
    return (
        f"{task.data.vocabulary} of {rows} tokens occur in the data: states will lean one way, away from the others",
    )


def _input_width(model: nn.Module, name: str) -> int:
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if isinstance(first, nn.Linear):
        return first.in_features
    if isinstance(first, nn.LayerNorm | nn.RMSNorm):
        return first.normalized_shape[-1]
    what = f"it has no embedding and begins with a {type(first).__name__}"
    raise NormLabError(f"{name}: cannot tell what to run it on, since {what}; {_ASK}")


def _fitting(tokens: TokenData, rows: int, name: str) -> TokenData:
    if tokens.vocabulary > rows:
        raise NormLabError(f"{name}: the data has {tokens.vocabulary} tokens, the model {rows}; try bigram data")
    return tokens


def _answers(model: nn.Module, name: str, task: TokenTask) -> int:
    """Size of a module's output for each token."""
    inputs, _ = next(task.batches(0))
    inputs = inputs.to(next(model.parameters()).device)
    with torch.no_grad(), untouched(model), in_one_line(f"{name}: cannot be run on token ids (batch, length)", _ASK):
        shape = answer(model(inputs)).shape
    if shape[:-1] != inputs.shape:
        raise NormLabError(f"{name}: returned {tuple(shape)} for token ids {tuple(inputs.shape)}; {_ASK}")
    return shape[-1]
