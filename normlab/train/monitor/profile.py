"""Per-block profiles during training: size, update, angle, cosine, rank and gradient at every block boundary.

One forward and one backward pass on a small batch, with the hooks of `normlab.probes` and their cheap measures alone.
Gradients and random numbers are restored afterwards. Boundary 0 is the state after the entry, boundary k the state
after block k. Measures stay on the device until the last one is made and are then copied to the host at once.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch

from normlab.data import IGNORED
from normlab.models.transformer import Transformer
from normlab.probes import measures
from normlab.probes.block_hooks import StackWatch
from normlab.probes.blocks import own_stack
from normlab.probes.ledger import Ledger
from normlab.probes.pooling import pool
from normlab.probes.profile import Profile, Series
from normlab.probes.untouched import eager_mode, untouched
from normlab.utils.spaced import evenly_spaced

RANKED = 17
"""Most boundaries whose effective rank is computed: it takes the eigenvalues of a matrix, on the host."""


def profile(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> dict[str, Any]:
    """The fields of a "profile" record, one value for each boundary; None stands for what is not finite.

    hidden_rms      √mean h² over tokens and entries
    update_ms       mean (h - h_before)² of what the block before the boundary added; None at 0
    angular_speed   angle in radians by which that block turned a token, mean over tokens; None at 0
    token_cosine    mean cosine of two tokens of a sequence
    effective_rank  exp(entropy of the normalised spectrum) of at most 256 tokens; None where it was not computed
    grad_norm       ‖∂(sum of the tokens' losses)/∂state‖ of one token, root mean square over tokens: whatever the batch
    """
    ledger, stack = Ledger(), own_stack(model.stack)
    ranked = evenly_spaced(len(stack.blocks) + 1, RANKED)
    watch = StackWatch(stack, ledger, measured=measures.CHEAP, ranked=ranked)
    with untouched(model), eager_mode(), ExitStack() as hooks:
        watch.listen(hooks)
        model.loss(inputs, targets, **options).backward()
    watch.finish()
    counted = ledger.write((targets != IGNORED).sum())
    ledger.close()
    found = Profile(boundaries=len(stack.blocks) + 1, **pool(watch.passes, ledger))
    # The loss is a mean over the targets that count, so a token's own gradient is that many times larger.
    return _fields(found, ledger[counted] / math.sqrt(watch.passes[0].tokens))


def _fields(found: Profile, of_one_token: float) -> dict[str, Any]:
    """A state is known if all its entries are finite, a block if both its states are."""
    whole = [share == 0.0 for share in found.broken]
    both = [before and after for before, after in pairwise(whole)]
    updates = [None if size is None else size * size for size in _known(found.branch_rms, both)]
    fine = [share == 0.0 for share in found.grad_broken]
    gradients = [None if norm is None else norm * of_one_token for norm in _known(found.grad_h, fine)]
    return {
        "layers": list(range(found.boundaries)),
        "hidden_rms": _known(found.rms, whole),
        "update_ms": [None, *updates],
        "angular_speed": [None, *_known(found.ang, both)],
        "token_cosine": _known(found.cos, whole),
        "effective_rank": _known(found.erank, whole),
        "grad_norm": [norm if norm is None or math.isfinite(norm) else None for norm in gradients],
    }


def _known(series: Series, known: list[bool]) -> Series:
    return [value if fit else None for value, fit in zip(series, known, strict=True)]
