"""The cloze task of benchmarks/cloze.py: what makes a question fair, equal files from equal text, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from normlab import DecoderConfig, NormLabError, TrainConfig
from normlab.evaluation import EvaluationConfig, evaluate
from normlab.evaluation.task_files import read_task_files
from normlab.train.trainer import train

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cloze.py"
SPEC = importlib.util.spec_from_file_location("cloze", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
cloze = importlib.util.module_from_spec(SPEC)
# Dataclasses look their module up.
sys.modules["cloze"] = cloze
SPEC.loader.exec_module(cloze)

NOUNS = re.findall(r"\w+", "river garden kitchen market harbour village morning winter letter window table candle")
FILLER = re.findall(r"\w+", "and then the old man with a grey coat went slowly on his way past it all once more")


def book(number: int, sentences: int = 400) -> str:
    """Sentences of 14 to 18 words that end in a noun, under two headings."""
    chance = random.Random(number)
    made = []
    for place in range(sentences):
        words = chance.sample(FILLER, chance.randint(13, 17))
        made.append(" ".join([f"Once{place}", *words, chance.choice(NOUNS)]) + ".")
    half = sentences // 2
    return "\n\n".join(["# Part one", " ".join(made[:half]), "# Part two", " ".join(made[half:])])


@pytest.fixture
def books(tmp_path) -> str:
    lines = "".join(json.dumps({"text": book(number)}) + "\n" for number in range(3))
    (tmp_path / "books.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    return str(tmp_path / "books.jsonl.xz")


def test_questions_are_fair(books):
    found = cloze.questions([books], most=20, seed=0)
    texts = {f"document {number}": book(number) for number in range(3)}
    assert Counter(one.document for one in found) == dict.fromkeys(texts, 20)
    for one in found:
        text, words = texts[one.document], [end.strip() for end in one.ends]
        right = words[one.answer]
        assert f"{one.start} {right}." in text
        assert 60 <= len(one.start.split()) <= 100
        assert one.start.startswith("Once")
        assert "#" not in one.start
        # Four words that are different, not in the passage, and alike in length and frequency.
        assert len({word[:4] for word in words}) == 4
        assert not set(words) & set(re.findall("[a-z]+", one.start.lower()))
        assert {len(word) for word in words} == {len(right)}
        assert all(0.5 <= text.count(f" {word}.") / text.count(f" {right}.") <= 2.0 for word in words)
    assert len({one.answer for one in found}) == 4


def test_frequency_does_not_give_the_answer_away(tmp_path):
    """Words whose frequencies differ: the place of the right one among the four, by frequency, is any."""
    nouns = [f"{letter * 4}er" for letter in "abcdefghijklmnopqrst"]
    frequency = Counter({noun: 100 + 4 * place for place, noun in enumerate(nouns)})
    chance, places = random.Random(0), Counter()
    for _ in range(400):
        right = nouns[chance.randrange(5, 15)]
        wrong = cloze.wrong_words(cloze.Passage("Nothing", right), nouns, frequency, chance)
        places[sum(frequency[word] > frequency[right] for word in wrong)] += 1
    # 400 draws of one place in four: 100, with a standard deviation of 8.7.
    assert sorted(places) == [0, 1, 2, 3]
    assert all(abs(count - 100) < 4 * 8.7 for count in places.values())


def test_passages_do_not_overlap():
    text = book(0)
    places = [text.index(passage.start) for passage in cloze.passages(text)]
    ends = [place + len(passage.start) for place, passage in zip(places, cloze.passages(text), strict=True)]
    assert len(places) > 20
    assert all(end < place for end, place in zip(ends, places[1:], strict=False))


def test_an_abbreviation_ends_no_sentence_and_a_name_is_no_answer():
    text = " ".join([*["Word"] * 70, "saw Mr. Brown in London. Then he met Mr. Green and went home to the garden. She"])
    assert [passage.word for passage in cloze.passages(text)] == ["garden"]


def test_what_the_passage_holds_is_not_asked_for():
    text = " ".join(["The garden was", *["so"] * 70, "far from the garden. She"])
    assert list(cloze.passages(text)) == []


def test_a_refrain_is_asked_for_once(tmp_path):
    (tmp_path / "a.txt").write_text(book(0))
    (tmp_path / "b.txt").write_text(book(0))
    once = cloze.questions([str(tmp_path / "a.txt")], most=1000, seed=0)
    both = cloze.questions([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], most=1000, seed=0)
    starts = [one.start for one in both]
    assert len(starts) == len(set(starts))
    assert {one.start for one in once} <= set(starts)


@pytest.mark.full
def test_equal_text_and_seed_give_equal_files(books, tmp_path):
    def made(name: str, seed: str) -> bytes:
        line = [sys.executable, SCRIPT, "--data", books, "--out", name, "--seed", seed, "--most", "9"]
        found = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert "27 questions from 3 documents" in found.stdout
        return (tmp_path / name / "cloze.jsonl").read_bytes()

    assert made("a", "0") == made("b", "0") != made("c", "1")
    # The order of questions mixes the documents: --limit takes the first ones.
    first = [json.loads(line)["document"] for line in (tmp_path / "a" / "cloze.jsonl").read_text().splitlines()[:9]]
    assert len(set(first)) == 3


def test_too_little_text_is_one_line(tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    with pytest.raises(NormLabError, match=r"no question can be made of .*short\.txt"):
        cloze.questions([str(tmp_path / "short.txt")], most=9, seed=0)


def test_the_task_runs_no_code_and_names_its_groups(books, tmp_path):
    cloze.write(cloze.questions([books], most=9, seed=0), tmp_path / "task", "cloze_books", "27 questions")
    (file,) = read_task_files([str(tmp_path / "task")], allow_code=False)
    assert file.names == ("cloze_books",)
    assert file.group_by == "document"


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason='needs lm_eval: pip install "normlab[eval]"')
def test_a_run_is_scored_with_errors_over_documents(books, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    config = TrainConfig(
        model=DecoderConfig(depth=1, dim=32, heads=2, scheme="peri", max_length=512), data=(books,), length=128,
        batch=4, tokens=4096, lr=1e-2, evals=1, saves=0,
    )  # fmt: skip
    train(config, tmp_path / "run", progress=False)
    cloze.write(cloze.questions([books], most=9, seed=0), tmp_path / "task", "cloze_books", "27 questions")
    offline = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    line = [sys.executable, "-m", "normlab", "eval", "run", "--tasks", "cloze_books", "--task-files", "task"]
    found = subprocess.run(
        [*line, "--device", "cpu"], cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "by group" in found.stdout
    (row,) = json.loads((tmp_path / "evaluation.json").read_text())["results"]
    (score,) = row["scores"]
    own = EvaluationConfig(runs=(str(tmp_path / "run"),), choices=(str(tmp_path / "task" / "cloze_books.jsonl"),))
    (same,) = evaluate(own, tmp_path / "own.json", progress=False)[0]["scores"]
    assert {name: list(group) for name, group in same.pop("groups").items()} == score["groups"]
    assert same == pytest.approx({name: value for name, value in score.items() if name != "groups"})
    assert [size for _, size in score["groups"].values()] == [9, 9, 9]
    assert score["value"] == pytest.approx(sum(mean for mean, _ in score["groups"].values()) / 3)
    assert score["stderr"] > 0.0
    assert score["group_stderr"] is not None
