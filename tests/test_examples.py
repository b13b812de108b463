"""The examples run as they stand, learn, follow their scheme's rules, and are what the guide shows."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from normlab import NormLabError
from normlab.probes.sharded import whole
from normlab.roles import Role
from tests.matrix import parametrize

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "docs" / "guides" / "elsewhere.md"
# Lines of the form "loss 5.56 → 2.40" that a script prints: one for each scheme that it trains.
TRAINED = {
    "fabric_loop.py": 1,
    "fsdp2_by_hand.py": 1,
    "hugging_face_trainer.py": 1,
    "nanogpt_after.py": 2,
    "nanogpt_before.py": 1,
    "plain_loop.py": 2,
}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
# nGPT wants more of attention and MLP than foreign ones offer.
CASES = {"geonorm": {}, "spannorm": {}, "ngpt": {"residual_only": True}}
STEPS = 6


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def example(name: str):
    return importlib.import_module(name)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def entropy_of_the_text() -> float:
    """What a model pays that knows how often each byte occurs and nothing of what stands before it."""
    counts = example("your_text").TEXT.bincount().double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def distance_from_unit_length(roles: Sequence[Role]) -> float:
    """The most that a vector of a matrix, along the model's width, differs in length from one."""
    matrices = [role for role in roles if role.is_matrix]
    assert matrices
    lengths = [torch.linalg.vector_norm(whole(role.parameter.detach()), dim=role.model_axis) for role in matrices]
    return max(float((length - 1).abs().max()) for length in lengths)


# Summing 64 squares in pairs costs log2(64)/2 eps, the root halves it, here and where the length was divided by; the
# quotient is rounded once.
UNIT = (2 * math.log2(64) / 4 + 2) * torch.finfo(torch.float32).eps


@parametrize("script", SCRIPTS, quick=("plain_loop.py",))
def test_it_runs_by_itself_and_learns(script):
    found = run("-W", "error", f"examples/{script}")
    assert found.returncode == 0, found.stderr
    assert found.stdout
    losses = re.findall(r"loss (\S+) → (\S+) nats", found.stdout)
    assert len(losses) == TRAINED.get(script, 0), found.stdout
    for first, last in losses:
        assert float(last) < min(float(first), entropy_of_the_text()), found.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_takes_under_60_lines(script):
    assert len((EXAMPLES / script).read_text().splitlines()) < 60


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "package", "advice"),
    [
        ("fabric_loop.py", "lightning_fabric", "pip install lightning-fabric"),
        ("hugging_face_trainer.py", "transformers", 'pip install "normlab[hf]"'),
    ],
)
def test_a_missing_package_is_one_line(script, package, advice):
    without = f"import runpy, sys; sys.modules[{package!r}] = None; sys.path.insert(0, 'examples')"
    found = run("-c", f"{without}; runpy.run_path('examples/{script}', run_name='__main__')")
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert f"needs {package.replace('_', '-')}" in line
    assert line.endswith(f"try: {advice}")


@parametrize("scheme", CASES, quick=("ngpt",))
def test_under_fabric_it_is_the_plain_loop_bit_for_bit(scheme):
    plain, losses = example("plain_loop").train(scheme, STEPS, **CASES[scheme])
    wrapped, same = example("fabric_loop").train(scheme, STEPS, **CASES[scheme])
    assert same == losses
    for ours, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loop", ["plain_loop", "fabric_loop"])
def test_the_constraint_holds(loop):
    model, _ = example(loop).train("ngpt", STEPS, residual_only=True)
    assert distance_from_unit_length(model.find_roles()) < UNIT


def test_without_the_line_it_would_not(monkeypatch):
    monkeypatch.setattr(example("your_own_model").YourModel, "after_step", lambda self: None)
    model, _ = example("plain_loop").train("ngpt", STEPS, residual_only=True)
    assert distance_from_unit_length(model.find_roles()) > 1000 * UNIT


@pytest.mark.full
def test_the_constraint_holds_in_the_trainer():
    model, _ = example("hugging_face_trainer").train("ngpt", STEPS)
    assert distance_from_unit_length(model.decoder.find_roles()) < UNIT


def test_the_trainers_helpers_take_any_model_with_such_methods(tmp_path):
    trainer = example("hugging_face_trainer")
    model = example("your_own_model").YourModel("ngpt", residual_only=True)
    args = trainer.TrainingArguments(str(tmp_path), **trainer.HOW)
    _, options = trainer.optimizer_cls_and_kwargs(model, args)
    assert {group["weight_decay"] for group in options["params"]} == {0.0}
    trainer.NormLabCallback().on_optimizer_step(args, None, None, model=model)
    assert distance_from_unit_length(model.find_roles()) < UNIT


def test_the_constraint_holds_in_nanogpt():
    nanogpt = example("nanogpt_after")
    model = nanogpt.GPT(nanogpt.GPTConfig(), "ngpt", residual_only=True)
    nanogpt.train(model, STEPS)
    assert distance_from_unit_length(model.find_roles()) < UNIT


def test_a_scheme_that_needs_more_of_your_attention_says_so():
    with pytest.raises(NormLabError, match=r"YourAttention, Sequential does not offer; .* residual_only=True"):
        example("plain_loop").train("ngpt", STEPS)


@pytest.mark.parametrize("scheme", CASES)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(scheme):
    model = example("your_own_model").YourModel(scheme, **CASES[scheme]).init_()
    groups = model.param_groups(lr=1e-3, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    for group in groups:
        assert group["weight_decay"] == 0.0 or all(parameter.ndim >= 2 for parameter in group["params"])


def test_initialisation_reaches_the_whole_model():
    model = example("your_own_model").YourModel("spannorm", depth=4).init_()
    for role in model.find_roles():
        if role.is_matrix:
            # SpanNorm: output projections divided by √depth. 4096 samples and more: σ known to 1/√8192 = 1.1 %.
            expected = 0.02 / (2.0 if role.role in ("o", "down") else 1.0)
            with role.edit() as weight:
                assert float(weight.detach().std()) == pytest.approx(expected, rel=0.05), role.name


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for scheme, to_stack in CASES.items():
        model, losses = example("fsdp2_by_hand").train(scheme, STEPS, **to_stack)
        sharded = all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        found[scheme] = [losses, distance_from_unit_length(model.find_roles()), sharded]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    # Without Python's teardown: gloo's threads may still be running, and C++ would abort.
    os._exit(0)


@pytest.mark.full
def test_two_sharded_processes_train_as_the_plain_loop(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    found = json.loads((tmp_path / "found.json").read_text())
    for scheme, to_stack in CASES.items():
        losses, length_error, sharded = found[scheme]
        assert sharded
        # Means over 1024 tokens in two halves: a few roundings (1.2e-7) each, which six steps of Adam carry on.
        assert losses == pytest.approx(example("plain_loop").train(scheme, STEPS, **to_stack)[1], rel=5e-6), scheme
        assert scheme != "ngpt" or length_error < UNIT


NAMES = (
    (r"^h\.(\d+)\.ln_1", r"h.layers.\1.block.steps.0.read"),
    (r"^h\.(\d+)\.ln_2", r"h.layers.\1.block.steps.1.read"),
    (r"^h\.(\d+)\.attn", r"h.layers.\1.branches.0"),
    (r"^h\.(\d+)\.mlp", r"h.layers.\1.branches.1"),
    (r"^ln_f", "h.exit"),
)


def renamed(name: str) -> str:
    for before, after in NAMES:
        name = re.sub(before, after, name)
    return name


def test_nanogpt_under_its_own_scheme_trains_as_before():
    before, after = example("nanogpt_before"), example("nanogpt_after")
    original = before.GPT(before.GPTConfig())
    changed = after.GPT(after.GPTConfig(), "pre(norm='layer', eps=1e-5)")
    changed.load_state_dict({renamed(name): weight for name, weight in original.state_dict().items()})
    # Two ways to write a LayerNorm: some roundings (1.2e-7) a layer, which six steps of Adam carry on.
    assert after.train(changed, STEPS) == pytest.approx(before.train(original, STEPS), rel=5e-6)


def blocks_of_the_guide(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_programs_in_the_guide_are_taken_from_the_examples():
    sources = [(EXAMPLES / script).read_text() for script in SCRIPTS]
    programs = blocks_of_the_guide("python")
    assert len(programs) >= 4
    for program in programs:
        # Three dots stand for what is left out.
        pieces = re.split(r"^ *\.\.\.\n", program, flags=re.MULTILINE)
        assert any(shows(source, pieces, indent) for source in sources for indent in ("", " " * 4, " " * 8)), program


def shows(source: str, pieces: Sequence[str], indent: str) -> bool:
    return all(textwrap.indent(piece, indent).strip("\n") in source for piece in pieces)


def test_the_guide_shows_what_changes_in_nanogpt():
    lines = difflib.unified_diff(classes_and_loop("before"), classes_and_loop("after"), n=1, lineterm="")
    (shown,) = blocks_of_the_guide("diff")
    # Without the names of the files and the numbers of lines.
    assert shown.splitlines() == [re.sub("^@@.*", "@@", line) for line in lines][2:]


def classes_and_loop(when: str) -> list[str]:
    text = (EXAMPLES / f"nanogpt_{when}.py").read_text()
    return text[text.index("class ") : text.index("\n\nif __name__")].splitlines()
