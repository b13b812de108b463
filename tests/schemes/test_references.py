"""Schemes named by file or module: found wherever a name is, found again later, or one line on what is missing."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normlab
from normlab import NormLabError
from normlab.bench import run as bench
from normlab.bench.step import Comparison, scheme_entrants
from normlab.compare import CompareConfig, compare
from normlab.compare.report import build
from normlab.compare.store import Store
from normlab.dynamics.simulate import simulate
from normlab.schemes.catalog import registry, terminal
from normlab.targets.resolve import resolve
from normlab.train.config import TrainConfig
from normlab.train.trainer import train
from tests import command
from tests.compare.small import base, write_text

HIGHWAY = """
from dataclasses import dataclass
import torch
from torch import nn
from normlab.schemes import Law, Scheme, Step, Write

@dataclass(frozen=True, kw_only=True)
class Highway(Scheme):
    '''A gate between the state and the update.'''
    name = "own"
    gate: float = -1.0

    def sublayer(self, site):
        return Step(Gate(self.gate), read=self.new_norm(site.dim))

    def law(self, depth):
        return Law(speed=lambda m: m.radius, rms=None, forward="bounded", backward="not known")

class Gate(Write):
    def __init__(self, start):
        super().__init__()
        self.start = start
        self.gate = nn.Parameter(torch.full((1,), start))

    def reset_parameters(self):
        nn.init.constant_(self.gate, self.start)

    def forward(self, state, update):
        share = torch.sigmoid(self.gate)
        return ((1 - share) * state + share * update).to(state.dtype)
"""
CARELESS = HIGHWAY.replace("    def reset_parameters", "    def forgotten")
SPEC = "highway.py:Highway(gate=-2)"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a scheme in it, which is the current one."""
    folder = tmp_path / "of mine (1)"
    folder.mkdir()
    (folder / "highway.py").write_text(HIGHWAY)
    monkeypatch.chdir(folder)
    return folder


def decoder(scheme, **changes) -> normlab.DecoderConfig:
    return normlab.DecoderConfig(scheme=scheme, depth=2, dim=16, heads=2, **changes)


def in_a_process(code: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


# -- the text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, "./highway.py:Highway( gate = -2 )", "highway:Highway(gate=-2)"])
def test_a_reference_is_read_and_read_back(here, spec):
    scheme = normlab.scheme(spec)
    assert scheme.label == "own(gate=-2.0)"
    assert normlab.scheme(str(scheme)) == scheme
    assert copy.deepcopy(scheme) == pickle.loads(pickle.dumps(scheme)) == scheme
    assert normlab.scheme(scheme, gate=-3.0).label == "own(gate=-3.0)"
    assert terminal.card(spec) is None
    sys.modules.pop("highway", None)


def test_stored_text_is_absolute_and_shared_text_is_not(here):
    scheme = normlab.scheme(SPEC)
    assert str(scheme).startswith(f"{here}/highway.py@")
    assert scheme.shared_text == str(scheme).removeprefix(f"{here}/")


@pytest.mark.full
def test_another_process_in_another_folder_finds_it(here, tmp_path):
    code = "import sys, normlab; print(normlab.scheme(sys.argv[1]).label)"
    assert in_a_process(code, tmp_path, str(normlab.scheme(SPEC))) == "own(gate=-2.0)"


def test_a_file_may_import_its_neighbours(here):
    before = list(sys.path)
    (here / "neighbour_of_better.py").write_text("FACTOR = 2.0")
    (here / "better.py").write_text(HIGHWAY.replace('"own"', '"better"') + "\nfrom neighbour_of_better import FACTOR")
    assert normlab.scheme("better.py:Highway").name == "better"
    assert sys.path == before


def test_a_scheme_of_ours_keeps_its_name():
    assert str(normlab.scheme("normlab.schemes.peri:Peri(step=0.5)")) == "peri(step=0.5)"


def test_a_subclass_is_not_taken_for_its_parent(here):
    (here / "wide.py").write_text(
        "from dataclasses import dataclass\nimport normlab\nHighway = type(normlab.scheme('highway.py:Highway'))\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Wide(Highway):\n    name = 'wide'\n"
    )
    assert normlab.scheme("wide.py:Wide").shared_text.startswith("wide.py@")


def test_a_file_that_registers_itself_is_found_by_its_file(here):
    (here / "self_made.py").write_text(
        "import normlab\n" + HIGHWAY.replace("@dataclass", "@normlab.register\n@dataclass")
    )
    try:
        first = normlab.scheme("self_made.py:Highway")
        assert str(first).startswith(str(here))
        (here / "self_made.py").write_text((here / "self_made.py").read_text().replace("-1.0", "-3.0"))
        assert normlab.scheme("self_made.py:Highway").gate == -3.0
    finally:
        registry.unregister(registry.find_class("own"))


def test_a_change_of_the_file_is_seen_at_once_and_by_stored_text(here):
    old = normlab.scheme("highway.py:Highway")
    # Of the same length and within the same second: what Python would keep in __pycache__ is not used.
    (here / "highway.py").write_text(HIGHWAY.replace("-1.0", "-3.0"))
    new = normlab.scheme("highway.py:Highway")
    assert (old.gate, new.gate) == (-1.0, -3.0)
    assert normlab.scheme(str(old)).gate == -1.0  # imported before: this process still has it
    code = "import sys, normlab\ntry: normlab.scheme(sys.argv[1])\nexcept normlab.NormLabError as error: print(error)"
    told = in_a_process(code, here, str(old))
    assert "highway.py has changed since it was used" in told
    assert "restore it" in told


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("higway.py:Highway", r"cannot read .*higway\.py: No such file"),
        ("highway.py:Higway", "unknown scheme of highway.py 'Higway'; did you mean 'Highway'"),
        ("highway.py:Gate", "highway.py:Gate is not a scheme but a class of another kind"),
        ("highway.py:torch", "highway.py:torch is not a scheme but a module"),
        ("highway.py:Highway(gat=-2)", "unknown option of own 'gat'; did you mean 'gate'"),
        ("highway.py:Highway(gate=big)", "own: gate must be a number"),
        ("highway.py:Highway(-2)", "cannot read scheme"),
        ("highway.py:Highway(gate=__import__('os'))", "cannot read scheme"),
        ("torn.py:Highway", r"torn\.py, line 1: "),
        ("lost.py:Highway", r"lost\.py cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("leaves.py:Highway", r"leaves\.py cannot be imported: SystemExit: 3"),
        ("empty.py:Highway", r"empty\.py has no 'Highway'; expected a class derived from normlab\.Scheme"),
        ("taken.py:Highway", "is called 'pre', as NormLab's Pre is; give it another name"),
        ("nameless.py:Highway", "nameless.py:Highway has no name; add e.g. name = 'highway'"),
        ("undecorated.py:Highway", r"has options but is not a dataclass; put @dataclass\(frozen=True, kw_only=True\)"),
        ("strict.py:Highway(gate=2)", "strict cannot be made: ValueError: too wide"),
        ("nowhere_at_all.schemes:Highway", "nowhere_at_all.schemes cannot be imported: ModuleNotFoundError"),
        ("highway.py", "unknown scheme 'highway.py'"),
    ],
)
def test_what_is_missing_is_said_in_one_line(here, spec, message):
    (here / "torn.py").write_text("def (")
    (here / "lost.py").write_text("import nowhere_at_all")
    (here / "leaves.py").write_text("raise SystemExit(3)")
    (here / "empty.py").write_text("")
    (here / "taken.py").write_text(HIGHWAY.replace('"own"', '"pre"'))
    (here / "nameless.py").write_text(HIGHWAY.replace('name = "own"', ""))
    (here / "undecorated.py").write_text(HIGHWAY.replace("@dataclass(frozen=True, kw_only=True)", ""))
    check = "    def check(self):\n        if self.gate > 0: raise ValueError('too wide\\nby far')\n\n    def sublayer"
    (here / "strict.py").write_text(HIGHWAY.replace("    def sublayer", check).replace('"own"', '"strict"'))
    with pytest.raises(NormLabError, match=message) as caught:
        normlab.scheme(spec)
    assert "\n" not in str(caught.value)


# -- every tool --------------------------------------------------------------------------------------------------------


def test_check_and_simulate_take_it(here):
    target = resolve(SPEC, depth=2, width=16)
    assert (target.kind, target.name, target.notes) == ("scheme", "own(gate=-2.0)", ())
    found = simulate(SPEC, tokens=4, dim=4, time=1.0, looks=2, shown=0, bins=0)
    assert found.runs[0].scheme == "own(gate=-2.0)"
    with pytest.raises(NormLabError, match="did you mean 'Highway'"):
        resolve("highway.py:Higway")


@pytest.mark.full
def test_check_works_on_a_law_without_rms(here):
    found = normlab.check(SPEC, depths=(2, 3), width=16)
    assert found.theory.growth == "bounded"
    assert found.theory.predicted == ()


def test_bench_takes_it(here, monkeypatch):
    names = [("pre", "triton"), (SPEC, "reference")]
    bench_of = Comparison(scheme_entrants(names, preset="tiny", length=8, stream="fp32"), batch=1)
    assert list(bench_of.entrants) == [("pre", "triton"), ("own(gate=-2.0)", "reference")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NormLabError, match="did you mean 'Highway'"):
        bench.step(["highway.py:Higway"], preset="tiny", batch=1, length=8, stream="fp32")


def run_config(text: Path, spec: str = SPEC, **changes) -> TrainConfig:
    return base(text, model=decoder(spec), **changes)


@pytest.mark.full
def test_a_run_is_resumed_and_loaded_from_another_folder(here, tmp_path, monkeypatch):
    text = write_text(tmp_path / "text")
    folder = tmp_path / "run"
    assert train(run_config(text), folder, progress=False).state == "done"
    assert run_config(text).name.startswith("own-gate--2.0-")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "highway.py").write_text(HIGHWAY)
    monkeypatch.chdir(elsewhere)
    # The same content in another folder is the same run.
    assert train(run_config(text), folder, progress=False).state == "done"
    code = "import sys, normlab; print(normlab.load_run(sys.argv[1]).model.stack.layers[0].block.steps[0].write.start)"
    assert in_a_process(code, elsewhere, str(folder)) == "-2.0"
    (elsewhere / "highway.py").write_text(HIGHWAY + "\n# another scheme")
    with pytest.raises(NormLabError, match=r"its scheme is 'highway.py@\w+:Highway\(gate=-2.0\)', not 'highway.py@"):
        train(run_config(text), folder, progress=False)


def test_an_export_names_the_file_and_not_its_folder(here, tmp_path):
    pytest.importorskip("transformers", reason="Hugging Face models need transformers")
    from normlab.hf import NormLabForCausalLM, export

    train(run_config(write_text(tmp_path / "text")), tmp_path / "run", progress=False)
    folder = export(tmp_path / "run", tmp_path / "export")
    written = (folder / "config.json").read_text() + (folder / "README.md").read_text()
    assert str(here) not in written
    assert "normlab.scheme('path/to/highway.py:Highway')" in written
    loaded = NormLabForCausalLM.from_pretrained(folder).decoder
    for name, value in normlab.load_run(tmp_path / "run").model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.full
def test_a_run_whose_file_is_gone_says_so(here, tmp_path):
    text = write_text(tmp_path / "text")
    folder = tmp_path / "run"
    train(run_config(text, "highway.py:Highway(gate=-4)"), folder, progress=False)
    (here / "highway.py").unlink()
    code = "import sys, normlab\ntry: normlab.load_run(sys.argv[1])\nexcept normlab.NormLabError as error: print(error)"
    told = in_a_process(code, tmp_path, str(folder))
    assert f"cannot read {here}/highway.py: No such file" in told


def small(text: Path, *schemes: str, **changes) -> CompareConfig:
    return CompareConfig(base=base(text), schemes=schemes, lrs=(1e-2,), seeds=1, workers=1, **changes)


@pytest.mark.full
def test_workers_of_a_comparison_find_it(here, tmp_path, monkeypatch):
    text, folder = write_text(tmp_path / "text"), tmp_path / "comparison"
    standings = compare(small(text, "pre", SPEC), folder, progress=False)
    assert {standing.label for standing in standings} == {"pre", "own(gate=-2.0)"}
    rows = Store(folder).rows()
    assert {row["scheme"] for row in rows} == {"pre", "own(gate=-2.0)"}
    # What is shared says which file it was, not where it lay.
    page = build(folder).read_text()
    for shared in (page, json.dumps(rows), (folder / "compare.json").read_text()):
        assert "own(gate=-2.0)" in shared
        assert str(here) not in shared
    # A changed file is another scheme: its rows are not mixed with the earlier ones.
    (here / "highway.py").write_text(HIGHWAY.replace("1 - share", "1.0 - share"))
    with pytest.raises(NormLabError, match=r"its scheme own\(gate=-2.0\) was highway.py@\w+:Highway, not highway.py@"):
        compare(small(text, "pre", SPEC), folder, progress=False)
    (here / "highway.py").write_text(HIGHWAY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert len(compare(small(text, "pre", f"{here}/{SPEC}"), folder, progress=False)) == 2


@pytest.mark.parametrize(
    "start",
    [
        lambda text, folder: train(run_config(text, "careless.py:Highway"), folder, progress=False),
        lambda text, folder: compare(small(text, "careless.py:Highway"), folder, progress=False),
    ],
    ids=["train", "compare"],
)
def test_a_gate_that_nobody_initialised_is_refused(here, tmp_path, start):
    text, folder = write_text(tmp_path / "text"), tmp_path / "out"
    (here / "careless.py").write_text(CARELESS)
    message = r"own: layers\.0\.block\.steps\.0\.write\.gate is not initialised: .*give Gate a reset_parameters"
    with pytest.raises(NormLabError, match=message):
        start(text, folder)
    assert not folder.exists()


def test_two_files_must_not_share_a_name(here, tmp_path):
    (here / "other.py").write_text(HIGHWAY + "\n")
    with pytest.raises(NormLabError, match=r"scheme own is named twice"):
        small(tmp_path, "highway.py:Highway", "other.py:Highway")


def test_the_command_line_takes_it(here, tmp_path):
    found = command.normlab("schemes", SPEC)
    assert found.returncode == 0, found.stderr
    assert "A gate between the state and the update." in found.stdout
    found = command.normlab("compare", "--schemes", "pre", "highway.py:Higway")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "normlab: unknown scheme of highway.py 'Higway'; did you mean 'Highway'? known: Highway\n"
    assert not (here / "comparison").exists()


@pytest.mark.full
def test_a_downloaded_model_does_not_choose_what_is_run(here, tmp_path):
    pytest.importorskip("transformers", reason="Hugging Face models need transformers")
    from normlab.hf.exporting.configuration import NormLabConfig

    config = NormLabConfig(model=decoder(SPEC))
    assert str(here) not in config.to_json_string()
    config.save_pretrained(tmp_path / "model")
    assert NormLabConfig.from_pretrained(tmp_path / "model").decoder_config == decoder(SPEC)
    code = (
        "import sys, normlab\nfrom normlab.hf.exporting.configuration import NormLabConfig\n"
        "try: NormLabConfig.from_pretrained(sys.argv[1])\nexcept normlab.NormLabError as error: print(error)\n"
        "normlab.scheme('highway.py:Highway')\nprint(NormLabConfig.from_pretrained(sys.argv[1]).decoder_config.scheme.label)"
    )
    refused, found = in_a_process(code, here, str(tmp_path / "model")).split("\n")
    assert "name it first if you trust it: normlab.scheme('path/to/highway.py:Highway')" in refused
    assert found == "own(gate=-2.0)"
