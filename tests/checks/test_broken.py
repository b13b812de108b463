"""Every broken design is found, by its own name and module; the healthy one that they are made from passes."""

from __future__ import annotations

from functools import cache

import torch

import normlab
from normlab.checks.judge.remedies import remedies
from normlab.checks.result import Check
from normlab.checks.view.summary import headline, meanings
from tests.checks import broken
from tests.matrix import parametrize

ALL = tuple(range(4))
ONE = (broken.GUILTY,)

FAULTS = {
    "detached_attention": ("untrained", "untrained", ALL, "blocks.0.attention"),
    "detached_attention_once": ("untrained", "untrained", ONE, "blocks.3.attention"),
    "detached_mlp": ("untrained", "untrained", ALL, "blocks.0.mlp"),
    "detached_mlp_once": ("untrained", "untrained", ONE, "blocks.3.mlp"),
    "detached_input": ("untrained", "detached", ALL, "blocks.0.attention.out"),
    "detached_input_once": ("untrained", "detached", ONE, "blocks.3.mlp.down"),
    "norm_over_batch": ("leaks", "mixes samples", (0,), "blocks.0.attention_norm"),
    "norm_over_time": ("leaks", "sees the future", (0,), "blocks.0.attention_norm"),
    "no_mask_once": ("leaks", "sees the future", ONE, "blocks.3.attention"),
    "no_final_norm": ("structure", "no final norm", (), "blocks.3"),
    "no_norm": ("structure", "no norm", ALL, "blocks.0.attention.out"),
    "huge_epsilon": ("structure", "norm off", ALL, "blocks.0.attention.out"),
    "huge_epsilon_once": ("structure", "norm off", ONE, "blocks.3.attention.out"),
    "huge_final_epsilon": ("structure", "norm off", (), "blocks.3"),
    "growing_skip": ("structure", "skip gain", ALL, "blocks.0"),
    "shrinking_skip": ("structure", "skip gain", ALL, "blocks.0"),
}
"""Design to the verdict, the finding, the blocks and the module to blame."""

QUICK = ("detached_input_once", "norm_over_batch", "no_mask_once", "no_final_norm", "huge_epsilon", "growing_skip")
"""One design of each kind of fault, for `make test`."""

NEW = ("untrained", "leaks", "structure", "start")


@cache
def report(name: str) -> Check:
    """Structural faults need neither depth nor long training."""
    return normlab.check(getattr(broken, name), depths=(4,), width=32, steps=2, length=16, batch_size=4)


@parametrize("name", FAULTS, quick=QUICK)
def test_a_broken_design_fails_by_its_fault(name):
    verdict, finding, layers, module = FAULTS[name]
    found = report(name).verdict(verdict)
    assert (found.finding, found.level) == (finding, "fail"), found.words
    assert (found.layers, found.module) == (layers, module)
    assert found.value is not None
    assert found.threshold is not None
    assert report(name).failed(report(name).config["fail_on"])


@parametrize("name", FAULTS, quick=QUICK)
def test_no_other_structural_fault_is_alleged(name):
    others = {verdict.name for verdict in report(name).verdicts if verdict.name in NEW and verdict.level == "fail"}
    # A state that nothing bounds makes logits of any size.
    assert others - {FAULTS[name][0]} <= ({"start"} if name == "no_norm" else set())


# One of each finding, and those that are checked above.
SPOKEN = {FAULTS[name][1]: name for name in reversed([*QUICK, *FAULTS])}.values()


@parametrize("name", FAULTS, quick={*SPOKEN, *QUICK})
def test_the_headline_the_bullets_and_the_remedies_speak_of_the_fault(name):
    check, found = report(name), report(name).verdict(FAULTS[name][0])
    words = {
        "untrained": "train", "detached": "gradient", "sees the future": "future", "mixes samples": "samples",
        "no norm": "norm", "no final norm": "norm before its head", "skip gain": "skip",
        "norm off": "epsilon",
    }[found.finding]  # fmt: skip
    assert words in headline(check)
    assert meanings(check)
    cures = [remedy for remedy in remedies(check.verdicts) if found.finding in remedy.cures]
    assert cures
    # A fault in the wiring is not cured by a rate or a warm-up.
    assert not any("rate" in words or "warm-up" in words for words in check.remedies)


def test_the_healthy_design_passes():
    check = report("healthy")
    assert {check.verdict(name).finding for name in NEW} == {"fine"}
    assert check.level != "fail"


def test_attention_that_is_written_out_is_measured():
    profile = report("healthy").profile()
    assert None not in profile.attn_entropy
    assert None not in profile.logit_max


def test_the_card_says_where_attention_cannot_be_seen():
    class Unseen(broken.Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.qkv(x)[..., : x.shape[1]].tril().exp()
            return self.out(scores / scores.sum(-1, keepdim=True) @ x)

    check = normlab.check(
        lambda depth, width: broken.Model(depth, width, broken.Design(attention=Unseen)),
        depths=(2,), width=32, steps=1, length=16, batch_size=4, start_size="none",
    )  # fmt: skip
    assert "attention (no softmax over keys was seen in a block)" in " ".join(check.table().split())


def test_nothing_beside_a_tick_is_past_its_limit():
    for name in ("healthy", *FAULTS):
        for verdict in report(name).verdicts:
            if verdict.level == "ok" and verdict.value is not None and verdict.threshold is not None:
                assert f"{verdict.threshold:g} is the limit" not in verdict.words or verdict.value <= verdict.threshold
