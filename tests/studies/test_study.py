"""Study files: what they say, what varies, the hash of the rule, and faults in one line that names the file."""

from __future__ import annotations

import tomllib

import pytest

from normlab.errors import NormLabError
from normlab.studies.rules.difference import DifferenceRule
from normlab.studies.run import comparison_configs, study_plan
from normlab.studies.study import find_studies, load_study, read_study
from tests.studies.rows import TINY, write_study


def study(text: str = TINY, name: str = "tiny"):
    return read_study(name, tomllib.loads(text), f"{name}.toml")


def test_a_file_is_read(tmp_path):
    folder = write_study(tmp_path / "studies")
    found = load_study("tiny", folder)
    assert find_studies(folder) == ["tiny"]
    assert found == load_study(str(folder / "tiny.toml"), folder)
    assert [claim.name for claim in found.claims] == ["gap", "never"]
    assert (found.kind, list(found.arms), found.settings["dim"]) == ("train", ["main"], 16)


def test_settings_are_those_of_a_comparison():
    (config,) = comparison_configs(study()).values()
    assert config.names == ("pre", "post")
    assert (config.lrs, config.seeds, config.base.model.dim, config.base.tokens) == ((1e-2,), 3, 16, 1536)
    short = study(TINY.replace("tokens = 1536", 'tokens = "2k"').replace("lrs = [1e-2]", "lrs = 1e-2"))
    (config,) = comparison_configs(short, {"data": ["x"], "tokenizer": None}).values()
    assert (config.base.tokens, config.base.data, config.base.tokenizer) == (2000, ("x",), "bytes")


def test_every_combination_of_what_varies_is_an_arm():
    text = TINY.replace("[[claims]]", "[vary]\nweight_decay = [0.1, 0.0]\nlrs = [1e-3, 2e-3, 4e-3]\n[[claims]]", 1)
    found = study(text)
    assert len(found.arms) == 6
    assert found.arms["weight_decay=0.0,lrs=0.002"] == {"weight_decay": 0.0, "lrs": 2e-3}
    configs = comparison_configs(found)
    assert configs["weight_decay=0.0,lrs=0.002"].lrs == (2e-3,)
    assert [size.runs for size in study_plan(found)] == [6] * 6
    named = study(TINY.replace("[[claims]]", "[arms.short]\nlength = 16\n[arms.long]\nlength = 32\n[[claims]]", 1))
    assert [config.base.length for config in comparison_configs(named).values()] == [16, 32]


def test_the_hash_is_that_of_the_rules_alone():
    first = study()
    assert study(TINY.replace("nobody", "somebody").replace("seeds = 3", "seeds = 4")).rule_hash == first.rule_hash
    assert study(TINY.replace("by = 2.0", "by = 2.5")).rule_hash != first.rule_hash
    assert study(TINY.replace("at_most = 0.0", "at_most = 0.1")).rule_hash != first.rule_hash
    moved = TINY.replace('scheme = "pre"\nagainst = "post"', 'against = "post"\nscheme = "pre"')
    assert study(moved).rule_hash == first.rule_hash


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cost =", "kost =", "unknown field in tiny.toml 'kost'; did you mean 'cost'"),
        ('title = "A tiny study"', "", "title must be a text"),
        ('kind = "difference"', 'kind = "differenz"', "tiny.toml, claim gap, rule.*did you mean 'difference'"),
        ("by = 2.0", "by = true", "by must be a number"),
        ('source = "nobody"', "", "tiny.toml, claim gap: source must be a text"),
        ('name = "never"', 'name = "gap"', "a name of its own"),
        ("[settings]", "[vary]\nlength = 3\n[settings]", "vary.length must be a list"),
        ("[settings]", "[arms.'a/b']\nlength = 3\n[settings]", "fit for a folder"),
        ('title = "A tiny study"', 'title = "A"\nkind = "trian"', "did you mean 'train'"),
    ],
)
def test_faults_name_file_and_field(old, new, words):
    with pytest.raises(NormLabError, match=words) as error:
        study(TINY.replace(old, new, 1))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("dim = 16", "dimm = 16", "unknown setting in tiny, main 'dimm'; did you mean 'dim'"),
        ("seeds = 3", 'seeds = "three"', "tiny, main: seeds must be a whole number"),
        ("seeds = 3", "seeds = [1, 2]", r"tiny, main: seeds must be a whole number, got \[1, 2\]"),
        ("depth = 2", "depth = [1, 2]", r"tiny, main: depth must be a whole number, got \[1, 2\]"),
        ("dim = 16", 'dim = "wide"', "tiny, main: dim must be a whole number, got 'wide'"),
        ("tokens = 1536", "tokens = [1536]", r"tiny, main: tokens must be a whole number, got \[1536\]"),
        ("lrs = [1e-2]", "lr = 1e-2", "name lrs"),
        ('"post"]', '"psot"]', "did you mean 'post'"),
        ('against = "post"', 'against = "peri"', "among those that run"),
    ],
)
def test_settings_and_rules_that_do_not_fit_are_refused_before_anything_runs(old, new, words, tmp_path):
    from normlab.studies.run import run_study

    with pytest.raises(NormLabError, match=words):
        run_study(study(TINY.replace(old, new, 1)), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


CORRECTED = TINY.replace("by = 2.0\n", "by = 2.0\n[claims.correction]\nwhy = 'two nats are no margin'\nby = 0.5\n")


def test_a_correction_changes_the_rule_and_not_what_was_registered():
    before, after = (read_study("tiny", tomllib.loads(text), "tiny.toml") for text in (TINY, CORRECTED))
    claim = after.claims[0]
    assert claim.correction is not None
    rules = claim.rule, claim.correction.registered
    assert [one.by for one in rules if isinstance(one, DifferenceRule)] == [0.5, 2.0]
    assert claim.correction.why == "two nats are no margin"
    assert before.rule_hash == after.rule_hash


@pytest.mark.parametrize(("old", "new", "words"), [
    ("why = 'two nats are no margin'\n", "", "correction: why must be a text"),
    ("by = 0.5", "bye = 0.5", "bye"),
    ("by = 0.5", "by = 2.0", "changes nothing"),
    ("theirs = \"2 nats\"", "theirs = \"2\"\nown_question = 1", "own_question must be true or false"),
])  # fmt: skip
def test_corrections_that_say_nothing_are_refused(old, new, words):
    with pytest.raises(NormLabError, match=words):
        read_study("tiny", tomllib.loads(CORRECTED.replace(old, new)), "tiny.toml")


def test_unknown_studies_get_a_suggestion(tmp_path):
    with pytest.raises(NormLabError, match="did you mean 'tiny'"):
        load_study("tinny", write_study(tmp_path / "studies"))
    with pytest.raises(NormLabError, match="no folder"):
        find_studies(tmp_path / "nowhere")
