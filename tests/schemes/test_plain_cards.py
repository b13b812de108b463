"""`normlab schemes` on schemes that say little: no sections, no docstring, no law, blocks of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from torch import nn

import normlab
from normlab.schemes import Add, Block, Law, Scheme, Step
from normlab.schemes.catalog import registry, terminal
from normlab.schemes.catalog.card import Card


@dataclass(frozen=True, kw_only=True)
class Plain(Scheme):
    """Adds what a branch returns.

    More is not said.
    """

    name = "plain-words"

    def sublayer(self, site):
        return Step(Add(site.dt), read=self.new_norm(site.dim))

    def law(self, depth):
        return Law(speed=None, rms=None, forward="linear", backward="not known")


@dataclass(frozen=True, kw_only=True)
class Silent(Scheme):
    name = "silent"
    size: int = 3

    def sublayer(self, site):
        return Step(Add(site.dt))


class Free(Block):
    """A block that is not made of steps."""

    def __init__(self):
        nn.Module.__init__(self)

    def forward(self, state, branches):
        for branch in branches:
            state = state + branch(state)
        return state


@dataclass(frozen=True, kw_only=True)
class Own(Scheme):
    """Own: a block without steps, [red] in colour."""

    name = "own-block"

    def block(self, sites, topology):
        return Free()


@pytest.fixture(autouse=True)
def _registered():
    for cls in (Plain, Silent, Own):
        normlab.register(cls)
    yield
    for cls in (Plain, Silent, Own):
        registry.unregister(cls)


def test_the_table_and_its_json_hold_them_all(capsys):
    terminal.schemes()
    table = capsys.readouterr().out
    assert all(name in table for name in ("plain-words", "silent", "own-block"))
    terminal.schemes(as_json=True)
    assert {"plain-words", "silent", "own-block"} <= {card["name"] for card in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain-words", ["Adds what a branch returns.", "Forward     linear\n"]),
        ("silent", ["silent", "size"]),
        ("own-block", ["a block without steps, [red] in colour.", "not known: its block is not made of steps"]),
    ],
)
def test_the_card_shows_what_there_is(name, words, capsys):
    terminal.card(name)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
    # A dataclass without a docstring is given its signature.
    assert "Silent(" not in shown


def test_a_sentence_is_a_summary_and_not_a_title():
    card = Card.of(Plain())
    assert (card.title, card.summary, card.sections) == ("plain-words", "Adds what a branch returns.", {})
