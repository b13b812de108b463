"""A cloze task for lm-evaluation-harness from any text: which of four words ends the sentence?

    python benchmarks/cloze.py --data books-val.jsonl.xz --name cloze_books --out cloze
    normlab eval runs/fox --tasks cloze_books --task-files cloze       # with lm-evaluation-harness
    normlab eval runs/fox --choices cloze/cloze_books.jsonl            # without it, the same score

A question is a passage of whole sentences of one document, less the last word, and four words to go on with. The wrong
ones end other sentences of the same document, are about as frequent in it and as long, so that neither frequency
nor length gives the answer away. No candidate occurs in the passage: it cannot be copied. Names are left
out (every candidate is in lower case). Passages do not overlap. The same text and seed give the same files.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro

from normlab.data import open_sources
from normlab.errors import NormLabError

CHOICES = 4
SHORTEST, LONGEST = 60, 100
"""Words in a passage."""
LETTERS = 4
"""Letters that a candidate has at least; two that begin with the same four may be forms of one word."""
NEAREST = 12
"""Words next in frequency from which the wrong ones are drawn."""
REPEATED = 8
"""Words before the gap that make two questions the same: refrains, quotations."""

_HEADING = re.compile(r"^#.*$", re.MULTILINE)
_WORD = re.compile(r"[a-z]+")
# A last word in capitals ("Mr.") ends no sentence; the next one begins with a capital.
_END = re.compile(r"(?<= )([a-z]+)[.!?][\"'”’)_]*\s+(?=[\"'“‘(_]*[A-Z])")

TASK = """\
# Made by benchmarks/cloze.py of NormLab: {about}
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
metadata:
  version: 1.0
  group_by: document  # questions on one document are not independent
"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the task is made of."""

    data: tuple[str, ...]
    """Text that no model was trained on: files, folders, globs, as in normlab train --val-data."""
    out: Path = Path("cloze")
    """Folder of the task."""
    name: str = "cloze"
    """Name of the task."""
    most: int = 300
    """Questions from one document at most."""
    seed: int = 0


class Passage(NamedTuple):
    """Whole sentences, and the word that ends the last one."""

    start: str
    word: str


class Question(NamedTuple):
    """One line of the task's data."""

    document: str
    start: str
    ends: list[str]
    answer: int


def main(arguments: Arguments) -> None:
    found = questions(arguments.data, most=arguments.most, seed=arguments.seed)
    about = f"{len(found):,} questions from {len({one.document for one in found})} documents, seed {arguments.seed}"
    print(f"{write(found, arguments.out, arguments.name, about)}: {about}")


def questions(data: Sequence[str], *, most: int, seed: int) -> list[Question]:
    """The questions on all documents, mixed: the first few (`--limit`) are from all of them."""
    made: list[Question] = []
    for number, document in enumerate(open_sources(data)):
        made += of_document(f"document {number}", document.text, most=most, seed=seed)
    made = _without_repeats(made)
    if not made:
        raise NormLabError(f"no question can be made of {', '.join(data)}; expected prose of some thousand words")
    random.Random(seed).shuffle(made)
    return made


def of_document(name: str, text: str, *, most: int, seed: int) -> list[Question]:
    """Questions on one document; their order in the text is kept."""
    frequency = Counter(_WORD.findall(text.lower()))
    last = sorted({end[1] for end in _END.finditer(text) if len(end[1]) >= LETTERS})
    chance = random.Random(f"{seed} {name}")
    made = [
        _question(name, passage, wrong, chance)
        for passage in passages(text)
        if (wrong := wrong_words(passage, last, frequency, chance))
    ]
    return [made[place] for place in sorted(chance.sample(range(len(made)), min(most, len(made))))]


def passages(text: str) -> Iterator[Passage]:
    """Passages that follow each other and contain no heading; the word that is left out is not in the rest."""
    for part in _HEADING.split(text):
        ends = list(_END.finditer(part))
        begins = [0, *(end.end() for end in ends)]
        first = 0
        for number, end in enumerate(ends):
            while _size(part[begins[first] : end.start()]) > LONGEST:
                first += 1
            start, word = part[begins[first] : end.start()].strip(), end[1]
            if _size(start) >= SHORTEST and len(word) >= LETTERS and word not in _words(start):
                yield Passage(start, word)
                first = number + 1


def wrong_words(
    passage: Passage, last: Sequence[str], frequency: Counter[str], chance: random.Random
) -> list[str] | None:
    """Three words to choose from beside the right one; None if the document has too few that are alike."""
    there, right = _words(passage.start), passage.word
    alike = [
        word for word in last
        if len(word) == len(right) and 0.5 <= frequency[word] / frequency[right] <= 2.0
        and word[:LETTERS] != right[:LETTERS] and word not in there
    ]  # fmt: skip
    alike.sort(key=lambda word: abs(math.log(frequency[word] / frequency[right])))
    # A place among the four, by frequency, that is drawn: else the right word would mostly be one of the middle ones.
    more = chance.randrange(CHOICES)
    drawn = _draw([word for word in alike if frequency[word] >= frequency[right]], more, chance)
    rest = [word for word in alike if frequency[word] <= frequency[right] and word not in drawn]
    drawn += _draw(rest, CHOICES - 1 - more, chance)
    # Two forms of one word among the wrong ones would leave three choices.
    return drawn if len({word[:LETTERS] for word in drawn}) == CHOICES - 1 else None


def _draw(nearest: Sequence[str], count: int, chance: random.Random) -> list[str]:
    return chance.sample(nearest[:NEAREST], min(count, len(nearest[:NEAREST])))


def write(found: Sequence[Question], folder: Path, name: str, about: str) -> Path:
    """The task's YAML file and, beside it, its data."""
    folder.mkdir(parents=True, exist_ok=True)
    data, task = folder / f"{name}.jsonl", folder / f"{name}.yaml"
    data.write_text("".join(json.dumps(one._asdict(), ensure_ascii=False) + "\n" for one in found), "utf-8")
    task.write_text(TASK.format(name=name, data=json.dumps(data.as_posix()), about=about), "utf-8")
    return task


def _question(name: str, passage: Passage, wrong: list[str], chance: random.Random) -> Question:
    words = [passage.word, *wrong]
    chance.shuffle(words)
    return Question(name, passage.start, [f" {word}" for word in words], words.index(passage.word))


def _without_repeats(made: Sequence[Question]) -> list[Question]:
    first = {tuple(one.start.split()[-REPEATED:]): one for one in reversed(made)}
    return [one for one in made if first[tuple(one.start.split()[-REPEATED:])] is one]


def _size(text: str) -> int:
    return len(text.split())


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments, description=__doc__))
    except NormLabError as error:
        raise SystemExit(f"cloze: {error}") from None
