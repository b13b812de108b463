"""`normlab bench step --peers`: other trainers' models are what they are said to be, and stand beside ours."""

from __future__ import annotations

import functools
import json
import multiprocessing
import pickle
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from normlab import NormLabError
from normlab.bench import contender, run, step, step_peers
from normlab.bench.contender import ContenderFacts, SchemeEntrant, Training
from normlab.bench.data_sheet import data_sheet_flops
from normlab.bench.step import BASELINE, Comparison, scheme_entrants
from normlab.cli.main import main
from normlab.models import DecoderConfig

CONFIG = DecoderConfig(depth=2, dim=32, heads=4, vocab_size=96, max_length=16, kernels="reference")
PEERS = {peer.label: peer for peer in step_peers.peers(CONFIG)}
LOGITS = {
    "nanogpt": lambda model, tokens: model(tokens)[0],
    "hf-llama": lambda model, tokens: model(tokens).logits,
    "litgpt": lambda model, tokens: model(tokens),
}


@functools.cache
def built(label: str) -> Training:
    peer = PEERS[label]
    if peer.package is not None and find_spec(peer.package) is None:
        pytest.skip(f"{peer.package} is not installed")
    torch.manual_seed(0)
    compiler, torch.compile = torch.compile, lambda call: call  # the compiler has its own tests
    try:
        return peer.build(torch.device("cpu"))
    finally:
        torch.compile = compiler


def closed_form(label: str) -> int:
    """Parameters: blocks with their norms, the last norm, and matrices of the vocabulary."""
    L, D, H, V, T = CONFIG.depth, CONFIG.dim, CONFIG.width_of_mlp, CONFIG.vocab_size, CONFIG.max_length
    if label == "nanogpt":
        return L * (4 * D * D + 8 * D * D + 2 * D) + D + V * D + T * D
    return L * (4 * D * D + 3 * D * H + 2 * D) + D + 2 * V * D


@pytest.mark.parametrize("label", PEERS)
def test_parameters_and_flops_have_a_closed_form(label):
    training = built(label)
    assert training.parameters == closed_form(label)
    # nanoGPT's embedding is its head, and its positions are looked up; a Llama's embedding is looked up.
    looked_up = CONFIG.max_length if label == "nanogpt" else CONFIG.vocab_size
    products = closed_form(label) - looked_up * CONFIG.dim
    assert training.flops_per_token == 6 * products + 12 * CONFIG.depth * CONFIG.dim * CONFIG.max_length


def test_flops_are_counted_as_ours_are():
    # A Llama has exactly the parameters of ours.
    assert built("hf-llama").parameters == CONFIG.num_params()
    assert built("hf-llama").flops_per_token == CONFIG.flops_per_token()


@pytest.mark.parametrize("label", PEERS)
def test_no_token_sees_a_later_one(label):
    model = built(label).model
    tokens = torch.randint(0, CONFIG.vocab_size, (2, CONFIG.max_length))
    other = tokens.clone()
    other[:, 9] = (tokens[:, 9] + 1) % CONFIG.vocab_size
    with torch.no_grad():
        before, after = (LOGITS[label](model, each) for each in (tokens, other))
    # The same operations on the same values, up to the order in which a product is summed.
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-5)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-4


@pytest.mark.parametrize("label", PEERS)
def test_steps_train(label):
    training = built(label)
    batch = torch.randint(0, CONFIG.vocab_size, (2, CONFIG.max_length + 1))
    losses = [training.step(batch[:, :-1], batch[:, 1:]).item() for _ in range(6)]
    # Weights start small, so that the first prediction is close to uniform.
    assert losses[0] == pytest.approx(torch.tensor(96.0).log().item(), abs=0.5)
    assert sorted(losses, reverse=True) == losses


def test_nanogpt_decays_matrices_alone():
    matrices, others = built("nanogpt").optimiser.param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_entrants_can_be_sent_to_a_process():
    entrants = [*PEERS.values(), SchemeEntrant(CONFIG)]
    assert pickle.loads(pickle.dumps(entrants)) == entrants


def test_what_is_not_installed_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(step_peers, "find_spec", lambda name: None)
    with pytest.raises(NormLabError, match=r"^litgpt is not installed; try pip install litgpt$"):
        PEERS["litgpt"].check(1)
    PEERS["nanogpt"].check(1)


def test_a_process_that_fails_says_so_in_one_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("cannot compile\nmore")

    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(contender, "Contender", fail)
    contender.serve(theirs, PEERS["nanogpt"], 1)
    assert ours.recv() == "RuntimeError: cannot compile"


def test_data_sheets_by_the_names_of_devices():
    assert data_sheet_flops("NVIDIA H200") == data_sheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert data_sheet_flops("NVIDIA A100-SXM4-80GB") == data_sheet_flops("NVIDIA A100 80GB PCIe") == 312e12
    assert data_sheet_flops("NVIDIA H100 PCIe") == 756e12
    assert data_sheet_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert data_sheet_flops("NVIDIA L40") is None
    assert data_sheet_flops("NVIDIA A10G") is None


# -- the whole command, with timings that are made up ------------------------------------------------------------------

FACTS = ContenderFacts(parameters=100, flops_per_token=1000, peak_bytes=50)
ANSWERS = {
    BASELINE: [FACTS, *[989e7] * 20],
    ("pre", "reference"): [FACTS, *[890.1e7] * 5],
    ("peri", "triton"): [FACTS, *[989e7] * 5],
    ("nanogpt", "torch.compile"): [ContenderFacts(200, 2000, 100), *[494.5e7] * 5],
    ("hf-llama", "torch.compile"): ["BackendCompilerFailed: no"],
}
"""What each contender's process sends: its facts, then a rate for every request."""


@pytest.fixture
def machine(monkeypatch):
    """An H200 with transformers and without litgpt, whose contenders answer at once."""
    answers = dict(ANSWERS)

    def start(self, name):
        ours, theirs = multiprocessing.Pipe()
        for answer in answers[name]:
            theirs.send(answer)
        self.ends = [*getattr(self, "ends", []), theirs]
        self.lines[name] = ours
        self.processes[name] = SimpleNamespace(kill=lambda: answers.setdefault("killed", []).append(name[0]))
        return ours

    monkeypatch.setattr(Comparison, "_start", start)
    monkeypatch.setattr(Comparison, "_room", lambda _: 0)
    monkeypatch.setattr(Comparison, "_fits", lambda _, name, busy, room: len(busy) < 2)
    monkeypatch.setattr(contender, "check_memory_to_train", lambda *_, **__: None)
    monkeypatch.setattr(step_peers, "find_spec", lambda name: None if name == "litgpt" else object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "matmul_ceiling", lambda *_: 791.2e12)
    return answers


def bench(*schemes, peers=True, out=None, **more):
    options = {"preset": "tiny", "batch": 2, "length": 16, "stream": "bf16", "repeats": 2, **more}
    return run.step(schemes, peers=peers, out=out, **options)


def test_peers_stand_beside_pre_norm(machine, capsys, tmp_path):
    out = tmp_path / "step.json"
    found = bench("pre", out=out)
    assert [row["scheme"] for row in found] == ["pre", "pre", "nanogpt"]
    peer = found[-1]
    assert (peer["over_pre"], peer["memory_over_pre"]) == (0.5, 2.0)
    assert (peer["parameters"], peer["flops_per_token"]) == (200, 2000)
    assert peer["mfu"] == pytest.approx(494.5e7 * 2000 / 989e12)
    assert [row["share_of_ceiling"] / row["mfu"] for row in found] == pytest.approx([1.25] * 3)
    said = capsys.readouterr()
    assert "hf-llama (torch.compile) is left out: BackendCompilerFailed: no\n" in said.err
    assert said.err.count("litgpt (torch.compile) is left out: litgpt is not installed; try pip install litgpt\n") == 1
    for column in ("parameters", "tokens/s", "× pre", "lowest", "highest", "memory × pre", "of ceiling", "MFU"):
        assert column in said.out
    kept = json.loads(out.read_text())
    assert kept["complete"] is True
    assert (kept["ceiling"], kept["data_sheet"]) == (791.2e12, 989e12)
    assert list(kept["left_out"]) == ["litgpt (torch.compile)", "hf-llama (torch.compile)"]
    assert kept["rows"] == json.loads(json.dumps(found))


def test_without_the_flag_there_are_none(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    found = bench("peri", peers=False)
    assert [(row["scheme"], row["mfu"]) for row in found] == [("pre", None), ("pre", None), ("peri", None)]
    said = capsys.readouterr()
    assert "left out" not in said.err
    assert "–" in said.out


def test_a_peer_that_fails_while_it_is_timed_costs_no_other(machine, capsys):
    machine["nanogpt", "torch.compile"] = [FACTS, 1e9, "OutOfMemoryError: full"]
    assert [row["scheme"] for row in bench("peri")] == ["pre", "pre", "peri"]
    assert "nanogpt (torch.compile) is left out: OutOfMemoryError: full" in capsys.readouterr().err


def test_a_peer_that_compiles_for_too_long_costs_no_other(machine, capsys):
    machine["nanogpt", "torch.compile"] = []
    assert [row["scheme"] for row in bench("peri", compile_limit=0.2)] == ["pre", "pre", "peri"]
    said = capsys.readouterr().err
    assert "nanogpt (torch.compile) is left out: not compiled within 0.2 s; try --compile-limit\n" in said
    assert "peri (triton) is compiled after 0 s\n" in said
    assert machine["killed"] == ["nanogpt"]


def test_a_scheme_that_fails_is_refused_after_the_rest_was_measured(machine, capsys, tmp_path):
    machine["peri", "triton"] = ["RuntimeError: broken"]
    with pytest.raises(
        NormLabError, match=r"^1 of the schemes .* not measured: peri \(triton\): RuntimeError: broken$"
    ):
        bench("peri", out=tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["complete"] is False
    assert "nanogpt" in capsys.readouterr().out


def test_nothing_is_compared_without_the_baseline(machine):
    machine[BASELINE] = ["RuntimeError: broken"]
    with pytest.raises(NormLabError, match=r"^pre \(triton\) failed: RuntimeError: broken$"):
        bench("peri")


def test_our_steps_are_recorded_and_those_of_peers_are_not(machine):
    recorded = {row["scheme"]: row["graphs"] for row in bench("peri")}
    assert recorded == {"pre": True, "peri": True, "nanogpt": False}
    assert not any(row["graphs"] for row in bench("peri", graphs=False))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_rate_is_that_of_the_recorded_step(monkeypatch, graphs):
    """Each repeat records the step once, with an optimiser that can be recorded, and times replays of it."""
    made = []
    entrant = scheme_entrants([("pre", "reference")], preset="tiny", length=16, stream="fp32", graphs=graphs)[0]

    def record(work, pool):
        made.append(("recorded", rival.training.optimiser.param_groups[0]["capturable"]))
        return SimpleNamespace(replay=lambda: made.append("replayed"))

    monkeypatch.setattr(contender, "record_cuda", record)
    monkeypatch.setattr(contender, "measure", lambda step, *_, **__: step() or SimpleNamespace(median=0.5))
    monkeypatch.setattr(contender.Contender, "step", lambda self: made.append("step"))
    rival = contender.Contender.__new__(contender.Contender)
    rival.tokens, rival.graphs, rival.device = 32, graphs, torch.device("cpu")
    rival.training = entrant.build(rival.device)
    assert rival.rate() == 64.0
    assert made == ([("recorded", True), "replayed"] if graphs else ["step"])


def test_memory_of_all_logits_is_reserved_for_peers(monkeypatch):
    ours = scheme_entrants([BASELINE], preset="tiny", length=16, stream="fp32")
    peer = step_peers.peers(ours[0].config)[0]
    assert peer.extra_bytes(2) == 10 * 2 * 16 * 256
    one = ours[0].config.memory(2, 16)
    step_of_ours = one.total - one.weights - one.optimiser
    monkeypatch.setattr(step, "_CONTEXT", 0)
    monkeypatch.setattr(step.os, "cpu_count", lambda: 8)
    bench = Comparison([*ours, peer], batch=2)
    # Memory for two contenders that wait, one that runs, and the step of a peer but for its logits.
    free = (2 * (one.weights + one.optimiser) + 2 * step_of_ours) / 0.95
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, free))
    room = bench._room()
    assert room == pytest.approx(2 * step_of_ours)
    assert bench._fits(BASELINE, [BASELINE], room + 1)
    assert not bench._fits(peer.name, [BASELINE], room + 1)
    assert bench._fits(peer.name, [], room)
    assert not bench._fits(BASELINE, [BASELINE] * 4, 100 * room)


def test_the_flag_reaches_the_benchmark(monkeypatch):
    seen = {}
    monkeypatch.setattr(run, "step", lambda schemes, **options: seen.update(options, schemes=tuple(schemes)))
    monkeypatch.setattr(sys, "argv", ["normlab", "bench", "step", "--schemes", "pre", "--peers"])
    main()
    assert (seen["peers"], seen["schemes"]) == (True, ("pre",))
