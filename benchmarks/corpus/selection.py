"""Which files of a package are source that people wrote: not vendored, generated, minified, tests or tables."""

from __future__ import annotations

import re

FEWEST_WORDS = 50
"""A shorter file is little but imports."""
LONGEST_LINE, MEAN_LINE = 1000, 100
"""Characters. Longer lines are data, or minified."""
LETTERS = 0.25
"""Share of a text that is letters at least; tables of numbers have less."""

# Other people's code, under other licences; and tests, which the built-in text `python` (normlab.data) leaves out, too.
_VENDORED = re.compile(r"_?vendor(ed)?(_\w+)?|_?third_?party|_?extern(al|als)?|site-packages")
_TEST = re.compile(r"tests?|test_.*\.py|.*_tests?\.py|conftest\.py")
_GENERATED = re.compile(r"\w+_pb2(_grpc)?\.py|_?version\.py|(parse|lex|yacc)tab\.py")
_SAYS_GENERATED = re.compile(r"generated (by|from|with|using|code|file)|auto-?generated|do not edit", re.IGNORECASE)
_HEAD = 500
"""Characters among which a file says that it is generated."""
_HEADER = re.compile(r"(?:[ \t]*(?:#.*)?\r?\n)+")
_WORD = re.compile(r"\w+")
_LETTERS = re.compile(r"[^\W\d_]+")


def reason_to_drop(path: str, raw: bytes) -> str:
    """Why a file is not kept; empty if it is."""
    parts = path.split("/")
    if any(_VENDORED.fullmatch(part.lower()) for part in parts[:-1]):
        return "vendored"
    if any(_TEST.fullmatch(part.lower()) for part in parts):
        return "tests"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if "\0" in text:
        return "not text"
    if _GENERATED.fullmatch(parts[-1]) or _SAYS_GENERATED.search(text, 0, _HEAD):
        return "generated"
    lines = text.splitlines()
    if len(_WORD.findall(without_header(text))) < FEWEST_WORDS:
        return "short"
    if max(map(len, lines)) > LONGEST_LINE or len(text) > MEAN_LINE * len(lines):
        return "long lines"
    if sum(map(len, _LETTERS.findall(text))) < LETTERS * len(text):
        return "few letters"
    return ""


def without_header(text: str) -> str:
    """The text below the comments at its top, which are mostly a notice that many files have word for word."""
    return text[header.end() :] if (header := _HEADER.match(text)) else text
