"""Presets, TOML files and short counts become plain flags, in the right order."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab import NormLabError
from normlab.cli import flags
from normlab.compare.config import CompareConfig
from normlab.models.config import PRESETS
from normlab.train.config import TrainConfig


def expand(words: list[str]) -> list[str]:
    return flags.expand(words, [TrainConfig], {})[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("200000", 200_000),
        ("200k", 200_000),
        ("33M", 33_000_000),
        ("1.5B", 1_500_000_000),
        ("3e7", 3 * 10**7),
        ("1_0", 10),
    ],
)
def test_counts(text, number):
    assert flags.count(text) == number
    assert expand(["--tokens", text]) == ["--tokens", str(number)]
    assert expand([f"--eval-tokens={text}"]) == [f"--eval-tokens={number}"]


@pytest.mark.parametrize("text", ["many", "1.5", "-3", "33MM", "", "1..2k", "--lr", "1e400"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(NormLabError, match="is not a count; expected a whole number"):
        expand(["--tokens", text])


def test_a_preset_comes_before_what_was_typed():
    words = expand(["--depth", "2", "--preset", "125m"])
    assert words[-4:] == ["--depth", "2", "--preset", "125m"]
    assert words[words.index("--dim") + 1] == str(PRESETS["125m"]["dim"])
    assert words[words.index("--length") + 1] == "1024"
    assert expand(["--preset=tiny"])[-1] == "--preset=tiny"


def test_a_file_comes_between(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "tiny"\nlr = 3e-4\n[model]\nbias = true\n[data]\ntokens = "20k"\ndata = ["a.txt", "b.txt"]\n'
    )
    words = expand(["--lr", "1e-3", "--toml", str(file)])
    assert [words[i + 1] for i, word in enumerate(words) if word == "--lr"] == ["0.0003", "1e-3"]
    assert words[words.index("--data") :][:3] == ["--data", "a.txt", "b.txt"]
    assert "--bias" in words
    assert words.index("--depth") < words.index("--bias")
    assert words[words.index("--tokens") + 1] == "20000"


def test_bad_files_and_presets_get_one_line(tmp_path):
    file = tmp_path / "run.toml"
    mistakes = {
        "depht = 3": "did you mean 'depth'", "depth = ": "is no TOML",
        "task = 'x'": "run.toml: unknown task 'x'", "preset = 'x'": "run.toml: unknown preset 'x'",
        "preset = 3": "run.toml: preset must be of type str, got 3",
        "depth = 'deep'": "run.toml: depth must be of type int, got 'deep'",
        "depth = [1, 2]": r"run.toml: depth must be of type int, got \[1, 2\]",
        "depth = true": "run.toml: depth must be of type int, got True",
        "[model]\nlr = 'fast'": "run.toml: lr must be a number, got 'fast'",
        "tokens = 'many'": "run.toml: tokens: 'many' is not a count; expected a whole number",
        "tokens = 1.5": "run.toml: tokens: '1.5' is not a count",
        "bias = 'yes'": "run.toml: bias must be of type bool, got 'yes'",
        "betas = [0.9]": "run.toml: betas must be a list of 2",
        "betas = 0.9": "run.toml: betas must be a list of 2",
        "data = 3": r"run.toml: data\[0\] must be of type str, got 3",
        "precision = 'fp8'": "run.toml: precision must be one of 'auto', 'fp32', 'bf16', got 'fp8'",
        "sinks = ['paper']": r"run.toml: sinks\[0\] must be one of",
        "kv_heads = 2.5": "run.toml: kv_heads must be of type int, got 2.5",
        "[model.depth]\nx = 1": "run.toml: depth must be of type int",
        "model = 'x'": "unknown setting in run.toml 'model'",
    }  # fmt: skip
    for text, message in mistakes.items():
        file.write_text(text)
        with pytest.raises(NormLabError, match=message):
            expand(["--toml", str(file)])
    with pytest.raises(NormLabError, match=r"cannot read .*; check the path"):
        expand(["--toml", str(tmp_path / "none.toml")])
    with pytest.raises(NormLabError, match="unknown preset '120m'; did you mean '125m'"):
        expand(["--preset", "120m"])


def test_a_file_may_write_values_as_the_command_line_takes_them(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("tokens = 20_000\nlr = 1\ndepth = '3'\nclip = inf\ndata = 'a.txt'\nkv_heads = 2\nout = 'there'\n")
    words, _ = flags.expand(["--toml", str(file)], [TrainConfig], {"out": Path | None})
    assert words[:6] == ["--tokens", "20000", "--lr", "1", "--depth", "3"]


def test_a_file_says_yes_and_no_to_flags_that_take_a_value(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("tied = false\nrepeat_failed = true\nzero-outputs = false\n")
    words, _ = flags.expand(["--toml", str(file)], [CompareConfig, TrainConfig], {})
    assert words[:4] == ["--tied", "False", "--repeat-failed", "--no-zero-outputs"]


def test_a_file_may_set_what_the_verb_itself_takes(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('out = "there"\nminutes = 9\n')
    words, _ = flags.expand(["--toml", str(file)], [CompareConfig, TrainConfig], {"out": Path, "minutes": float})
    assert words[:4] == ["--out", "there", "--minutes", "9"]
    with pytest.raises(NormLabError, match=r"unknown setting in run\.toml 'minutes'"):
        flags.expand(["--toml", str(file)], [TrainConfig], {"out": Path})


@pytest.mark.parametrize(("name", "several"), [("scheme", "schemes"), ("lr", "lrs"), ("seed", "seeds")])
def test_one_of_what_a_comparison_has_several_of_is_not_ignored(tmp_path, name, several):
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = 'pre'\n" if name == "scheme" else f"{name} = 1\n")
    for words in (["--toml", str(file)], [f"--{name}", "1"], [f"--{name}=1"]):
        assert expand(words)
        with pytest.raises(NormLabError, match=f"a comparison has no {name} of its own; name --{several}"):
            flags.expand(words, [CompareConfig, TrainConfig], {})
    assert flags.expand([f"--{several}", "1"], [CompareConfig, TrainConfig], {})[0] == [f"--{several}", "1"]
