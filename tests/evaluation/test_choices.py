"""`normlab eval --choices`: equal to log-likelihoods taken one at a time, and one line for a file that is wrong."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import normlab
from normlab import DecoderConfig, NormLabError, TrainConfig
from normlab.data.tokenizer import train_bpe
from normlab.evaluation import EvaluationConfig, evaluate
from normlab.evaluation.choices import Choices, Question, _sequences, read_questions
from normlab.evaluation.store import key_of
from normlab.train.trainer import train
from tests.command import normlab as command

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(100))
LONGEST = 48
ENDS = (" fox", " jumps", " the", " green horses")


def questions() -> list[dict]:
    """Starts of 4 to 60 bytes, of which the model takes 48."""
    starts = [TEXT[place : place + 4 + 3 * place % 57].rstrip() for place in range(0, 200, 7)]
    return [
        {"start": start, "ends": list(ENDS), "answer": k % 4, "document": "ab"[k % 2]} for k, start in enumerate(starts)
    ]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    (folder / "a.txt").write_text(TEXT)
    (folder / "ends.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions()))
    config = TrainConfig(
        model=DecoderConfig(depth=1, dim=32, heads=2, scheme="peri", max_length=LONGEST), data=(str(folder / "a.txt"),),
        length=LONGEST, batch=4, tokens=4096, lr=1e-2, evals=1, saves=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(folder / "cache"))
        assert train(config, folder / "run", progress=False).state == "done"
    return folder


@torch.no_grad()
def is_right(run, question: dict) -> bool:
    found = []
    for end in question["ends"]:
        words = run.tokenizer.encode(question["start"] + end).tolist()
        ids = torch.tensor([[run.tokenizer.end, *words]])[:, -LONGEST - 1 :]
        chances = run.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])
        found.append(float(chances[0, -len(end) :].sum()))
    return int(np.argmax(found)) == question["answer"]


def test_the_score_is_that_of_single_log_likelihoods(places, tmp_path):
    out = tmp_path / "e.json"
    words = ("eval", str(places / "run"), "--choices", str(places / "ends.jsonl"), "--batch", "3", "--device", "cpu")
    found = command(*words, "--out", str(out))
    assert found.returncode == 0, found.stderr
    loaded = normlab.load_run(places / "run")
    right = np.array([float(is_right(loaded, question)) for question in questions()])
    # A model that is always right or always wrong would agree with anything.
    assert 0 < right.mean() < 1
    (score,) = json.loads(out.read_text())["results"][0]["scores"]
    assert (score["task"], score["metric"], score["samples"]) == ("ends", "acc", len(right))
    assert score["value"] == pytest.approx(right.mean())
    assert score["stderr"] == pytest.approx(right.std(ddof=1) / np.sqrt(len(right)))
    assert score["groups"] == {"a": [right[::2].mean(), len(right[::2])], "b": [right[1::2].mean(), len(right[1::2])]}
    assert "done before" in command(*words, "--out", str(out)).stderr


@pytest.mark.parametrize(
    ("start", "scored"),
    [
        ("the quick", {" brown": " brown", " fox": " fox"}),
        ("the quick ", {"brown": " brown", "fox": " fox"}),
        # " quick" is one token, which begins in the start.
        ("the qu", {"ick": " quick"}),
    ],
)
def test_no_end_is_without_tokens(start, scored):
    """A word and the space before it are one token, whichever of start and end has the space."""
    words = train_bpe([TEXT], 301)
    subject = SimpleNamespace(tokenizer=words, longest=LONGEST)
    found = _sequences(subject, Question(start, tuple(scored), 0, None))
    assert [words.decode(one.ids[one.first :]) for one in found] == list(scored.values())


def test_files_of_one_name_and_copies_are_told_apart(places, tmp_path):
    names = ("books/ends.jsonl", "news/ends.jsonl", "news/ends.json", "copy.jsonl")
    files = [tmp_path / name for name in names]
    for count, file in zip((6, 4, 3, 6), files, strict=True):
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(question) + "\n" for question in questions()[:count]))
    config = EvaluationConfig(runs=(str(places / "run"),), choices=tuple(map(str, files)), device="cpu")
    rows = evaluate(config, tmp_path / "e.json", progress=False)
    found = [(score["task"], score["samples"]) for row in rows for score in row["scores"]]
    assert found == [*zip(map(str, files[:3]), (6, 4, 3), strict=True), ("copy", 6)]
    assert [row["task"] for row in rows] == [task for task, _ in found]


def test_scores_have_the_newest_name_of_their_questions(places, tmp_path):
    """Of a file that was renamed: the page of a comparison takes names from the file of scores."""
    out = tmp_path / "e.json"
    for name in ("old", "new"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(questions()[0]) + "\n")
        config = EvaluationConfig(runs=(str(places / "run"),), choices=(str(tmp_path / f"{name}.jsonl"),), device="cpu")
        (row,) = evaluate(config, out, progress=False)
        (stored,) = json.loads(out.read_text())["results"]
        assert [row["task"], stored["task"], stored["scores"][0]["task"]] == [name] * 3


def test_a_limit_takes_the_first(places, tmp_path):
    config = EvaluationConfig(runs=(str(places / "run"),), choices=(str(places / "ends.jsonl"),), limit=3, device="cpu")
    (row,) = evaluate(config, tmp_path / "e.json", progress=False)
    assert row["scores"][0]["samples"] == 3


@pytest.mark.parametrize(
    "line",
    [
        "{}", "[]", "no JSON", '{"start": 1, "ends": [" a", " b"], "answer": 0}',
        '{"start": "s", "ends": [" a"], "answer": 0}',
        '{"start": "s", "ends": [" a", " b"], "answer": 2}', '{"start": "s", "ends": [" a", ""], "answer": 0}',
        '{"start": "s", "ends": [" a", " b"], "answer": true}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_line_that_is_no_question_is_named(line, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"start": "s", "ends": [" a", " b"], "answer": 1}\n' + line + "\n")
    with pytest.raises(NormLabError, match=r"q\.jsonl:2 is not a question; expected"):
        read_questions(path)


def test_an_empty_or_missing_file_is_said(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(NormLabError, match="holds no question"):
        read_questions(tmp_path / "empty.jsonl")
    with pytest.raises(NormLabError, match="cannot read"):
        read_questions(tmp_path / "missing.jsonl")


def test_a_file_of_other_programs_is_read(tmp_path):
    """With a byte-order mark, and with a line separator within a text, which JSON allows as it is."""
    path = tmp_path / "q.jsonl"
    path.write_text(
        '\ufeff{"start": "a\u2028b", "ends": [" a", " b"], "answer": 1}\r\n\n', encoding="utf-8", newline=""
    )
    assert read_questions(path) == [Question("a\u2028b", (" a", " b"), 1, None)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"start": "caf\xe9", "ends": [" a", " b"], "answer": 1}', r"q\.jsonl:1: byte 0xe9 is not UTF-8; convert"),
        (
            b'{"start": "s", "ends": [" a", "\\ud800"], "answer": 1}',
            r"q\.jsonl:1 holds half a surrogate pair; expected",
        ),
    ],
)
def test_text_that_is_none_is_one_line(line, says, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(line)
    with pytest.raises(NormLabError, match=says):
        read_questions(path)


@pytest.mark.parametrize(
    ("start", "ends", "rule"),
    [("the quick", [" fox", " cat"], None), ("the quick ", ["fox", "cat"], 2), ("the qu", ["ick", "ite"], 2)],
)
def test_scores_of_the_older_rule_are_not_taken_for_new_ones(start, ends, rule, tmp_path):
    """The older rule took an end that merges with its start for certain; where it cannot, its scores are kept."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"start": start, "ends": ends, "answer": 0}))
    facts = Choices(str(path), EvaluationConfig(runs=("run",), choices=(str(path),))).facts(SimpleNamespace())
    older = {name: facts[name] for name in ("kind", "questions", "limit")}
    assert facts.get("rule") == rule
    assert (key_of("weights", facts) == key_of("weights", older)) == (rule is None)
