"""Task files: what they may hold, and what is refused because it would run code."""

from __future__ import annotations

import pytest

from normlab import NormLabError
from normlab.evaluation.task_files import read_task_files

GOOD = """
task: cloze
tag: [ours]
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
metric_list: [{metric: acc}]
"""


def written(folder, text: str) -> str:
    (folder / "data.jsonl").write_text("{}\n")
    (folder / "task.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")))
    return str(folder / "task.yaml")


def test_a_file_and_its_folder_hold_one_task(tmp_path):
    path = written(tmp_path, GOOD)
    for place in (path, str(tmp_path)):
        (found,) = read_task_files([place], allow_code=False)
        assert found.names == ("cloze", "ours")


def test_the_fingerprint_is_that_of_files_includes_and_data(tmp_path):
    path = written(tmp_path, GOOD + "include: base\n")
    (tmp_path / "base").write_text("num_fewshot: 0\n")

    def fingerprint() -> str:
        return read_task_files([path], allow_code=False)[0].fingerprint

    seen = [fingerprint(), fingerprint()]
    (tmp_path / "base").write_text("num_fewshot: 1\n")
    seen.append(fingerprint())
    (tmp_path / "data.jsonl").write_text("{}\n{}\n")
    seen.append(fingerprint())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "process_docs: !function utils.process\n", "runs the Python function utils.process"),
        (GOOD + "class: /tmp/module.py.Task\n", "'class' runs Python code"),
        (GOOD + "metadata: {trust_remote_code: true}\n", "'trust_remote_code' runs"),
        (GOOD + "unsafe_code: true\n", "'unsafe_code' runs"),
        (GOOD.replace("{metric: acc}", "{metric: someone/metric}"), "would be code from the hub"),
        (GOOD.replace("{metric: acc}", "{metric: acc, hf_evaluate: true}"), "'hf_evaluate' runs"),
        (GOOD.replace("dataset_path: json", "dataset_path: pandas"), "dataset_path 'pandas' may run code"),
        (GOOD.replace("dataset_path: json", "dataset_path: here/script.py"), "may run code"),
        (GOOD + "include: task.yaml\n", "includes itself"),
        (GOOD + "include: other.yaml\n", "other.yaml cannot be read"),
        ("a: !!python/object/apply:os.system [true]\n", "is not YAML"),
        ("- 1\n", "expected the settings of a task"),
        ("a: [\n", "is not YAML"),
        ("dataset_path: json\n", "name no task"),
    ],
)
def test_what_would_run_code_or_is_no_task_is_refused(text, message, tmp_path):
    with pytest.raises(NormLabError, match=message) as caught:
        read_task_files([written(tmp_path, text)], allow_code=False)
    assert "\n" not in str(caught.value)


def test_code_is_allowed_when_asked_for(tmp_path):
    path = written(tmp_path, GOOD + "process_docs: !function utils.process\n")
    assert read_task_files([path], allow_code=True)[0].names == ("cloze", "ours")


def test_missing_places_are_named(tmp_path):
    with pytest.raises(NormLabError, match="does not exist"):
        read_task_files([str(tmp_path / "none.yaml")], allow_code=False)
    with pytest.raises(NormLabError, match=r"holds no \.yaml file"):
        read_task_files([str(tmp_path)], allow_code=False)
