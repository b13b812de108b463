"""x-transformers 2.31.10: pre, post, sandwich = peri, DeepNorm's forward, LayerScale and KEEL's block.

Its RMSNorm divides by the length with a floor of 1e-12, so ours runs with eps = 0. Its gains and LayerScale vectors are
held as offsets from one, so a gain of either of our kinds can be set from them.
"""

from dataclasses import dataclass

import pytest
from torch import nn

import normlab

from .compare import WRONG, check, copy_gains, module_differences, quiet_imports, scatter_, states, tolerance

with quiet_imports():
    from x_transformers import Decoder
    from x_transformers.x_transformers import LayerScale

D, DEPTH = 32, 4


@dataclass(frozen=True)
class Case:
    options: dict
    """What makes x-transformers build the scheme."""
    ours: str
    wrong: str
    """Another scheme with the same parameters."""
    first: int = 0
    """Where our stack begins: KEEL's first block is an exception that x-transformers does not know."""


CASES = {
    "pre": Case({}, "pre", wrong="lns"),
    "post": Case({"pre_norm": False}, "post", wrong="deepnorm"),
    "sandwich": Case({"sandwich_norm": True}, "peri(entry_norm=False)", wrong="peri(entry_norm=False, step=0.9)"),
    "deepnorm": Case(
        {"pre_norm": False, "scale_residual_constant": (2 * DEPTH) ** 0.25}, "deepnorm", wrong="deepnorm(alpha=1.5)"
    ),
    "layerscale": Case(
        {"use_layerscale": True, "layerscale_init_value": 0.5}, "layerscale", wrong="peri(entry_norm=False)"
    ),
    "keel": Case(
        {"pre_and_post_norm": True, "scale_residual_constant": 2 * (DEPTH + 1)}, "keel", "keel(alpha=blocks)", first=1
    ),
}


def decoder(**options) -> Decoder:
    sizes = {"dim": D, "depth": DEPTH, "heads": 2, "attn_dim_head": 16}
    return Decoder(**sizes | {"use_rmsnorm": True} | options).double()


def gain(norm: nn.Module) -> nn.Parameter:
    assert norm.unit_offset
    return norm.g if hasattr(norm, "g") else norm.gamma


def take_apart(theirs: Decoder) -> tuple[list[tuple[nn.Module, ...]], list[nn.Parameter]]:
    """Its sublayers, two a block, and its gains in the order of their places."""
    branches, gains = [], []
    for (before, after_branch, after_sum), sublayer, _ in theirs.layers:
        scaled = isinstance(sublayer, LayerScale)
        places = [before, sublayer if scaled else None, after_branch, after_sum]
        gains += [gain(norm) for norm in places if norm is not None]
        branches.append(sublayer.fn if scaled else sublayer)
    if next(theirs.final_norm.parameters(), None) is not None:
        gains.append(gain(theirs.final_norm))
    return list(zip(branches[::2], branches[1::2], strict=True)), gains


def compare(case: Case, scheme: str, eps: float = 0.0, their_norm: dict | None = None, **options) -> dict[str, float]:
    theirs = decoder(**case.options | (their_norm or {}))
    blocks, gains = take_apart(theirs)
    scatter_(gains)
    ours = normlab.scheme(scheme, eps=eps, **options)
    stack = normlab.Stack(ours, blocks, D, first=case.first).double()
    return module_differences(theirs, stack, states(D), copy_gains(stack, gains, offset=1.0))


@pytest.mark.parametrize("kind", ["plain", "offset"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_match(name: str, kind: str):
    check(compare(CASES[name], CASES[name].ours, gain=kind), tolerance())


@pytest.mark.parametrize("name", CASES)
def test_layer_norm_matches_too(name: str):
    their_norm = {"use_rmsnorm": False}
    found = compare(CASES[name], CASES[name].ours, eps=nn.LayerNorm(D).eps, their_norm=their_norm, norm="layer")
    check(found, tolerance())


@pytest.mark.parametrize("name", CASES)
def test_another_scheme_is_told_apart(name: str):
    found = compare(CASES[name], CASES[name].wrong)
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG
