"""The public names, as literal lists: what users may import and type, and what became of the names of version 0.1."""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.resources import files

import pytest

import normlab
from normlab.cli.main import main

PUBLIC = {
    "normlab": [
        "Decoder", "DecoderConfig", "Encoder", "EncoderConfig", "NormLabError", "Scheme", "Stack", "TrainConfig",
        "VisionConfig", "VisionTransformer", "check", "check_coordinates", "geometry", "ladder", "list_schemes",
        "load_run", "norms", "ops", "probe", "register", "scheme", "schemes", "simulate", "testing",
    ],
    "normlab.schemes": [
        "Add", "AddNorm", "Block", "BoundScheme", "BoundedSequential", "ConstantScale", "Law", "LearnedScale", "Motion",
        "Need", "ParallelBlock", "Scheme", "SerialBlock", "Site", "Step", "ToSphere", "Topology", "Write",
        "find_class", "list_schemes", "register", "scheme", "unregister",
    ],
    "normlab.models": [
        "MLP", "PRESETS", "Attention", "Decoder", "DecoderConfig", "Encoder", "EncoderConfig", "KVCache", "MoE",
        "VisionConfig", "VisionTransformer",
    ],
    "normlab.data": [
        "IGNORED", "Batch", "BatchLoader", "Corpus", "Document", "ImageSamples", "ImageSet", "Loader", "Masking",
        "Source", "TextSamples", "Tokenizer", "Tokens", "evaluation_batches", "image_evaluation", "load_tokenizer",
        "open_source", "open_sources", "prepare", "prepare_images",
    ],
    "normlab.train": [
        "ImageTrainConfig", "LanguageTrainConfig", "MaskedTrainConfig", "Run", "TrainConfig", "TrainResult", "load_run",
        "train",
    ],
    "normlab.compare": ["CompareConfig", "compare"],
    "normlab.ladders": ["LadderConfig", "LadderRow"],
    "normlab.checks": [
        "Check", "CheckConfig", "CoordinateCheck", "HFCallback", "Ladder", "Theory", "Thresholds", "Verdict", "Watch",
        "judge_ladder",
    ],
    "normlab.probes": ["Probe", "Profile", "measure"],
    "normlab.targets": ["Target", "resolve"],
    "normlab.hf": [
        "HIDDEN_STATE", "ConvertedLayer", "FunctionChanges", "LayerStructure", "NormLabCallback", "NormLabConfig",
        "NormLabForCausalLM", "ResidualBranch", "Rules", "SchemeIdentity", "convert", "export", "identify", "load",
        "optimizer_cls_and_kwargs", "rules",
    ],
    "normlab.evaluation": ["EvaluationConfig", "Score", "evaluate"],
    "normlab.ops": ["Affine", "geodesic_step", "residual_step", "sphere_lerp", "unit_rows_"],
    "normlab.geometry": [
        "angle", "distance", "exp", "log", "norm", "project", "sinc_sqrt", "transport", "unit", "versine_sqrt",
    ],
    "normlab.norms": [
        "NORMS", "Derf", "DyT", "Gain", "Identity", "L2Norm", "LayerNorm", "Norm", "RMSNorm", "l2_norm", "layer_norm",
        "norm", "rms", "rms_norm", "widen",
    ],
    "normlab.testing": ["RULES", "Rule", "check_scheme"],
}  # fmt: skip

VERBS = [
    "bench", "check", "compare", "completion", "doctor", "eval", "export", "generate", "ladder", "report",
    "schemes", "simulate", "study", "train", "watch",
]  # fmt: skip
BENCHMARKS = ["grid", "kernels", "step"]

MOVED = {
    "normlab.data.Feed": "normlab.data.BatchLoader",
    "normlab.data.ImageLine": "normlab.data.ImageSamples",
    "normlab.data.TextLine": "normlab.data.TextSamples",
    "normlab.hf.Anatomy": "normlab.hf.LayerStructure",
    "normlab.hf.Identity": "normlab.hf.SchemeIdentity",
    "normlab.hf.Limb": "normlab.hf.ResidualBranch",
    "normlab.hf.STATE": "normlab.hf.HIDDEN_STATE",
    "normlab.report.build": "normlab.compare.report.build",
    "normlab.report.markdown": "normlab.compare.report.markdown",
    "normlab.schemes.Bound": "normlab.schemes.BoundScheme",
    "normlab.schemes.Chain": "normlab.schemes.BoundedSequential",
    "normlab.schemes.Constant": "normlab.schemes.ConstantScale",
    "normlab.schemes.Scale": "normlab.schemes.LearnedScale",
    "normlab.schemes.find": "normlab.schemes.find_class",
    "normlab.schemes.names": "normlab.schemes.list_schemes",
    "normlab.stability.Check": "normlab.checks.Check",
    "normlab.stability.CheckConfig": "normlab.checks.CheckConfig",
    "normlab.stability.HFCallback": "normlab.checks.HFCallback",
    "normlab.stability.Ladder": "normlab.checks.Ladder",
    "normlab.stability.Profile": "normlab.probes.Profile",
    "normlab.stability.Target": "normlab.targets.Target",
    "normlab.stability.Theory": "normlab.checks.Theory",
    "normlab.stability.Thresholds": "normlab.checks.Thresholds",
    "normlab.stability.Verdict": "normlab.checks.Verdict",
    "normlab.stability.Watch": "normlab.checks.Watch",
    "normlab.stability.judge": "normlab.checks.judge_ladder",
    "normlab.stability.measure": "normlab.probes.measure",
    "normlab.stability.resolve": "normlab.targets.resolve",
    "normlab.train.Result": "normlab.train.TrainResult",
}
"""Names of version 0.1 and what replaced them."""


def named(path: str) -> object:
    place, _, name = path.rpartition(".")
    return getattr(importlib.import_module(place), name)


@pytest.mark.parametrize("place", PUBLIC)
def test_the_public_names_are_these(place):
    module = importlib.import_module(place)
    assert sorted(module.__all__) == sorted(PUBLIC[place])
    assert set(module.__all__) <= set(dir(module)) or hasattr(module, "__getattr__")


@pytest.mark.parametrize("path", [f"{place}.{name}" for place, names in PUBLIC.items() for name in names])
def test_every_public_name_is_there_and_says_what_it_is(path):
    found = named(path)
    # Constants and aliases of types have no docstring of their own.
    if inspect.isclass(found) or inspect.isroutine(found) or inspect.ismodule(found):
        text = inspect.getdoc(found) or ""
        # A dataclass without a docstring is given its signature as one.
        assert text, f"{path} has no docstring"
        assert not text.startswith(f"{path.rpartition('.')[2]}("), f"{path} has the docstring of its signature"


@pytest.mark.parametrize("old", MOVED)
def test_names_of_version_0_1_still_work(old):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}") as warned:
        found = named(old)
    assert found is named(MOVED[old])
    # The warning points at the code that uses the name.
    assert warned[0].filename == __file__


def test_the_list_of_schemes_may_still_be_called():
    with pytest.warns(DeprecationWarning, match=r"now normlab\.list_schemes\(\)"):
        assert normlab.schemes() == normlab.list_schemes()


def test_a_name_that_never_was_is_an_attribute_error():
    for place in ("normlab", "normlab.schemes", "normlab.data", "normlab.train", "normlab.stability"):
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'"):
            named(f"{place}.nothing")


@pytest.mark.parametrize(("words", "expected"), [(["nothing"], VERBS), (["bench", "nothing"], BENCHMARKS)])
def test_the_verbs_are_these(words, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    known = capsys.readouterr().err.partition("known: ")[2]
    assert ended.value.code == 2
    assert known.replace("\n", " ").strip().split(", ") == expected


def test_the_package_is_typed():
    assert files("normlab").joinpath("py.typed").is_file()
