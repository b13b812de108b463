"""What a command line means: presets, TOML files, stored runs and flags, in the right order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normlab import NormLabError
from normlab.cli import main
from normlab.compare import comparison
from normlab.models.config import PRESETS
from normlab.train import trainer
from normlab.train.config import TrainConfig
from normlab.train.storage.folder import RunFolder
from normlab.utils.counts import parse_count


class Parsed(Exception):  # noqa: N818
    """Raised in place of the work, with what the work would have been."""

    def __init__(self, config: Any, folder: Path, **options: Any):
        self.config, self.folder, self.options = config, folder, options


@pytest.fixture
def parse(monkeypatch):
    """What a command line asks for: configuration and folder."""

    def parse(*words: str) -> Parsed:
        def stop(config, folder, **options):
            raise Parsed(config, folder, **options)

        monkeypatch.setattr("sys.argv", ["normlab", *words])
        monkeypatch.setattr(trainer, "train", stop)
        monkeypatch.setattr(comparison, "compare", stop)
        with pytest.raises(Parsed) as caught:
            main.run(list(words))
        return caught.value

    return parse


def refused(*words: str) -> str:
    """The error that a command line gets."""
    with pytest.raises(NormLabError) as caught:
        main.run(list(words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("200000", 200_000),
        ("200k", 200_000),
        ("33M", 33_000_000),
        ("1.5B", 1_500_000_000),
        ("1.4T", 1_400_000_000_000),
        ("3e7", 3 * 10**7),
        ("1_0", 10),
    ],
)
def test_counts(text, number, parse):
    assert parse_count(text) == number
    assert parse("train", "--tokens", text).config.tokens == number
    assert parse("train", f"--eval-tokens={text}").config.eval_tokens == number
    assert parse("compare", "--task", "images", "--images", text).config.base.images == number


@pytest.mark.parametrize("text", ["many", "1.5", "-3", "33MM", "", "1..2k", "1e400"])
def test_what_is_no_count_is_refused(text):
    assert f"{text!r} is not a count; expected a whole number" in refused("train", f"--tokens={text}")
    if not text.startswith("-"):
        assert f"{text!r} is not a count; expected a whole number" in refused("train", "--tokens", text)


def test_a_flag_is_no_count():
    assert "Missing value for argument '--tokens'" in refused("train", "--tokens", "--lr", "1")


def test_a_preset_comes_before_what_was_typed(parse):
    config = parse("train", "--depth", "2", "--preset", "125m").config
    assert (config.model.depth, config.model.dim, config.length) == (2, PRESETS["125m"]["dim"], 1024)
    assert parse("train", "--preset=tiny").config.model.dim == PRESETS["tiny"]["dim"]
    assert parse("compare", "--preset", "125m", "--task", "masked").config.base.length == 512


def test_a_file_comes_between(tmp_path, parse):
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "125m"\nlr = 3e-4\n[model]\nbias = true\ndepth = 3\n'
        '[data]\ntokens = "20k"\ndata = ["a.txt", "b.txt"]\n'
    )
    config = parse("train", "--lr", "1e-3", "--toml", str(file)).config
    assert (config.lr, config.data, config.tokens) == (1e-3, ("a.txt", "b.txt"), 20_000)
    assert (config.model.bias, config.model.depth, config.model.dim) == (True, 3, PRESETS["125m"]["dim"])
    assert parse("train", "--toml", str(file)).config.lr == 3e-4
    assert parse("train", f"--toml={file}", "--preset", "tiny").config.model.dim == PRESETS["tiny"]["dim"]


def test_what_a_file_leaves_open_a_flag_may_complete(tmp_path, parse):
    file = tmp_path / "run.toml"
    # Neither is possible without the other: 100 has no 8 equal heads.
    file.write_text("dim = 100\nheads = 8\n")
    assert parse("train", "--toml", str(file), "--heads", "5").config.model.dim == 100
    assert refused("train", "--toml", str(file)).startswith("run.toml: ")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("train", "--learning-rate", "1e-3"), "--lr"), (("compare", "--learning-rate=1e-3"), "--lrs"),
        (("train", "--layers", "4"), "--depth"), (("ladder", "--batch-size", "4"), "--batch"),
        (("train", "--steps", "10"), "--tokens"), (("train", "--config", "run.toml"), "--toml"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)  # fmt: skip
def test_names_of_other_programs_lead_to_ours(words, near):
    assert refused(*words).endswith(f"; did you mean {near}?")


def test_a_file_may_name_the_task(tmp_path, parse):
    file = tmp_path / "run.toml"
    file.write_text("task = 'masked'\nmask = 0.3\n")
    assert parse("train", "--toml", str(file)).config.mask == 0.3
    assert refused("train", "--toml", str(file), "--task", "language") == (
        "run.toml: task language has no mask; leave it out, or try --task masked"
    )


def test_a_stored_run_may_be_named_in_a_file_or_with_an_underscore(parse, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    stored = TrainConfig.preset("tiny", scheme="post", schedule="wsd", warmup=10, tokens=2**20, branches=(2**19,))
    folder.mkdir()
    RunFolder(folder).begin(stored, "cpu")
    file.write_text(f'resume = "{folder}"')
    assert parse("train", "--toml", str(file)).config == stored
    file.write_text(f'branch-from = "{folder}"')
    branch = stored.branch(2**19)
    for words in (("--toml", str(file)), ("--branch_from", str(folder)), ("--branch-from", str(folder))):
        assert parse("train", *words, "--tokens", str(2**19)).config == branch


def test_bad_files_and_presets_get_one_line(tmp_path):
    file = tmp_path / "run.toml"
    mistakes = {
        "depht = 3": "did you mean 'depth'", "depth = ": "is not valid TOML",
        "task = 'x'": "run.toml: unknown task 'x'", "preset = 'x'": "run.toml: unknown preset 'x'",
        "preset = 3": "run.toml: preset must be of type str, got 3",
        "depth = 'deep'": "run.toml: depth must be of type int, got 'deep'",
        "depth = [1, 2]": "run.toml: depth must be of type int, got [1, 2]",
        "depth = true": "run.toml: depth must be of type int, got True",
        "[model]\nlr = 'fast'": "run.toml: lr must be a number, got 'fast'",
        "tokens = 'many'": "run.toml: tokens: 'many' is not a count; expected a whole number",
        "tokens = 1.5": "run.toml: tokens: '1.5' is not a count",
        "tokens = true": "run.toml: tokens: 'True' is not a count",
        "tokens = [1]": "run.toml: tokens: '[1]' is not a count",
        "[data.tokens]\nx = 1": "run.toml: tokens: \"{'x': 1}\" is not a count",
        "branches = [true]": "run.toml: branches: 'True' is not a count",
        "bias = 'yes'": "run.toml: bias must be of type bool, got 'yes'",
        "betas = [0.9]": "run.toml: betas must be a list of 2",
        "betas = 0.9": "run.toml: betas must be a list of 2",
        "data = 3": "run.toml: data[0] must be of type str, got 3",
        "precision = 'fp8'": "run.toml: precision must be one of 'auto', 'fp32', 'bf16', got 'fp8'",
        "sinks = ['paper']": "run.toml: sinks[0] must be one of",
        "kv_heads = 2.5": "run.toml: kv_heads must be of type int, got 2.5",
        "[model.depth]\nx = 1": "run.toml: depth must be of type int",
        "model = 'x'": "unknown setting in run.toml 'model'",
        "presets = 'x'": "unknown setting in run.toml 'presets'",
        "continued = [1]": "unknown setting in run.toml 'continued'",
        "flip = true": "run.toml: task language has no flip; leave it out, or try --task images",
        "learning_rate = 1e-3": "run.toml: unknown option 'learning_rate'; did you mean --lr?",
        "[model]\nlr = 1e-3\n[data]\nlr = 1e-2": "run.toml: lr is set twice; tables only group names, so leave one out",
        "base_dim = 8\n[model]\nbase-dim = 9": "run.toml: base_dim is set twice; tables only group names",
    }  # fmt: skip
    for text, message in mistakes.items():
        file.write_text(text)
        found = refused("train", "--toml", str(file))
        assert message in found, text
        assert found.count("run.toml") == 1, text
    found = refused("train", "--toml", str(tmp_path / "none.toml"))
    assert found.startswith("cannot read ")
    assert found.endswith("; check the path")
    assert "unknown preset '120m'; did you mean '125m'" in refused("train", "--preset", "120m")


def test_a_file_may_write_values_as_the_command_line_takes_them(tmp_path, parse):
    file = tmp_path / "run.toml"
    file.write_text("tokens = 20_000\nlr = 1\ndepth = '3'\nclip = inf\ndata = 'a.txt'\nkv_heads = 2\nout = 'there'\n")
    found = parse("train", "--toml", str(file))
    config = found.config
    assert (config.tokens, config.lr, config.model.depth, config.model.kv_heads) == (20_000, 1.0, 3, 2)
    assert (config.clip, config.data, found.folder) == (float("inf"), ("a.txt",), Path("there"))


def test_a_file_says_yes_and_no(tmp_path, parse):
    file = tmp_path / "run.toml"
    file.write_text("tied = false\nrepeat_failed = true\nzero-outputs = false\nbias = true\n")
    config = parse("compare", "--toml", str(file)).config
    model = config.base.model
    assert (model.tied, config.repeat_failed, model.zero_outputs, model.bias) == (False, True, False, True)
    changed = parse("compare", "--toml", str(file), "--tied", "None", "--no-bias", "--no-repeat-failed").config
    assert (changed.base.model.tied, changed.base.model.bias, changed.repeat_failed) == (None, False, False)


def test_a_file_may_set_what_the_verb_itself_takes(tmp_path, parse):
    file = tmp_path / "run.toml"
    file.write_text('out = "there"\nminutes = 9\n')
    found = parse("compare", "--toml", str(file))
    assert (found.folder, found.options["minutes"]) == (Path("there"), 9.0)
    assert parse("compare", "--toml", str(file), "--out", "here").folder == Path("here")
    assert "unknown setting in run.toml 'minutes'" in refused("train", "--toml", str(file))


@pytest.mark.parametrize(("name", "several"), [("scheme", "schemes"), ("lr", "lrs"), ("seed", "seeds")])
def test_one_of_what_a_comparison_has_several_of_is_not_ignored(tmp_path, parse, name, several):
    file, value = tmp_path / "run.toml", "pre" if name == "scheme" else "1"
    file.write_text(f"{name} = '{value}'\n")
    for words in (["--toml", str(file)], [f"--{name}", value], [f"--{name}={value}"]):
        assert parse("train", *words)
        assert f"a comparison has no {name} of its own; name --{several}" in refused("compare", *words)
    assert parse("compare", f"--{several}", value)


def test_what_is_parsed_is_the_class_of_the_task(parse):
    masked = parse("train", "--task", "masked", "--data", "x", "--mask", "0.2").config
    assert (type(masked).__name__, masked.mask, masked.data) == ("MaskedTrainConfig", 0.2, ("x",))
    images = parse("compare", "--task=images", "--flip", "--schemes", "pre", "peri").config
    assert (type(images.base).__name__, images.base.flip, images.names) == ("ImageTrainConfig", True, ("pre", "peri"))
