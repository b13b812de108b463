"""Further validation sets: scored at the end of a run, each as if it were the validation data."""

from __future__ import annotations

import dataclasses

import pytest

import normlab
from normlab import NormLabError
from normlab.train.config import TrainConfig
from normlab.train.distributed import ALONE
from normlab.train.evaluate import evaluate
from normlab.train.trainer import train
from tests.train.runs import config_of, events, normlab_train, numbers, weights, write_text
from tests.train.test_tasks import config_of as config_of_task


@pytest.fixture(scope="module")
def files(text, tmp_path_factory):
    """Two validation sets: words of the same language, and digits."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "digits.txt").write_text(" ".join(str(number) for number in range(400)))
    return write_text(folder / "words.txt", 300), folder / "digits.txt"


@pytest.fixture
def sets(files):
    return tuple(f"{path.stem}={path}" for path in files)


def test_a_run_is_scored_on_every_set(text, files, sets, straight, tmp_path):
    result = train(config_of(text, val_sets=sets), tmp_path / "run", progress=False)
    *_, last = [record for record in numbers(tmp_path / "run") if record["kind"] == "eval"]
    scores = ["loss", "bits_per_byte"]
    names = [*scores, *(f"{score}_{name}" for name in ("words", "digits") for score in scores)]
    assert list(result.scores) == names
    assert {name: last[name] for name in names} == result.scores
    assert result.scores["loss_words"] + 1.0 < result.scores["loss_digits"]
    # The run itself is the one without them.
    for name, value in weights(straight).items():
        assert (weights(tmp_path / "run")[name] == value).all()
    before = [record for record in numbers(straight) if record["kind"] != "profile"]
    found = [record for record in numbers(tmp_path / "run") if record["kind"] != "profile"]
    assert found[:-1] == before[:-1]
    assert {name: last[name] for name in before[-1]} == before[-1]
    # Each set is scored as the validation data of a run would be.
    run = normlab.load_run(tmp_path / "run")
    for path in files:
        apart = dataclasses.replace(run.config, val_sets=(), val_data=(str(path),))
        data = apart.task_object.open(apart, progress=False)
        alone = evaluate(run.model.cross_entropy, data, apart, ALONE)
        assert alone == {name: pytest.approx(result.scores[f"{name}_{path.stem}"]) for name in scores}


def test_a_set_is_no_part_of_the_training_data(text, sets):
    plain, config = config_of(text), config_of(text, val_sets=(*sets, f"own={text}"))
    with pytest.raises(NormLabError, match="every document of data is in val_data or val_sets too"):
        config.task_object.open(config, progress=False)
    config = config_of(text, val_sets=sets)
    corpora = [one.task_object.open(one, progress=False) for one in (plain, config)]
    assert corpora[0].train.fingerprint == corpora[1].train.fingerprint
    assert corpora[0].fingerprint != corpora[1].fingerprint
    assert corpora[1].facts()["val_sets"].keys() == {"words", "digits"}
    assert "digits 1,490 tokens" in corpora[1].describe()


def test_documents_of_a_set_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    config = TrainConfig(data=(str(tmp_path),), val_sets=(f"three={tmp_path / '3.txt'}",), val_fraction=0.2)
    with_set = config.task_object.open(config, progress=False)
    without = dataclasses.replace(config, val_sets=())
    alone = without.task_object.open(without, progress=False)
    assert with_set.val.fingerprint == alone.val.fingerprint
    # Unless it is among those held out.
    assert with_set.train.n_documents == alone.train.n_documents - 1
    assert with_set.train.fingerprint != alone.train.fingerprint


def test_masked_tokens(text, sets, tmp_path):
    result = train(config_of_task("masked", text, steps=3, val_sets=sets), tmp_path / "run", progress=False)
    assert list(result.scores) == ["loss", "accuracy", "loss_words", "accuracy_words", "loss_digits", "accuracy_digits"]


def test_the_name_of_a_run_knows_its_sets(text, sets):
    plain, config = config_of(text), config_of(text, val_sets=sets)
    assert plain.identity != config.identity
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert "val_sets" not in plain.to_dict()


@pytest.mark.parametrize("given", ["books", "=books.txt", "two words=a.txt", "2nd=a.txt", "books="])
def test_other_names_are_refused_in_one_line(given):
    with pytest.raises(NormLabError, match="val_sets expects NAME=FILES") as refused:
        TrainConfig(val_sets=(given,))
    assert "\n" not in str(refused.value)
    with pytest.raises(NormLabError, match="val_sets names a set twice: a=x a=y"):
        TrainConfig(val_sets=("a=x", "a=y"))
    with pytest.raises(NormLabError, match="task images has no val_sets"):
        TrainConfig(task="images", val_sets=("a=x",))


def test_by_hand(text, sets, tmp_path, monkeypatch, capsys):
    words = ["--depth", "1", "--dim", "16", "--heads", "2", "--length", "16", "--batch", "2", "--tokens", "64"]
    words += ["--data", str(text), "--val-sets", *sets, "--eval-tokens", "200", "--out", str(tmp_path / "run")]
    assert normlab_train(monkeypatch, *words) == 0
    assert "; words 5." in (said := capsys.readouterr().out)
    assert "; digits " in said
    assert events(tmp_path / "run") == []
