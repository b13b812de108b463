"""Rules that turn rows into verdicts: a small fixed set, selected and parametrised by a study's TOML file.

difference   the paired difference of two schemes against a threshold
change       how that difference changes from one arm (size, budget, length) to another
order        the order of several schemes, all pairs together
bound        a value of a scheme, or its ratio to another scheme's, against a bound
count        how many runs diverged, failed, were stuck or spiked
correlation  the correlation of two values over many runs
rank         the order of schemes against the order that theory gives
gap          the gap of two schemes at a cell of a ladder
trend        how that gap moves within the ladder
rate         the best learning rates of a scheme in several arms
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normlab.errors import NormLabError, unknown
from normlab.studies.rules.base import Rule
from normlab.studies.rules.bound import BoundRule
from normlab.studies.rules.change import ChangeRule
from normlab.studies.rules.correlation import CorrelationRule
from normlab.studies.rules.count import CountRule
from normlab.studies.rules.difference import DifferenceRule
from normlab.studies.rules.gap import GapRule
from normlab.studies.rules.order import OrderRule
from normlab.studies.rules.rank import RankRule
from normlab.studies.rules.rate import RateRule
from normlab.studies.rules.trend import TrendRule
from normlab.utils.records import from_plain, hints

_ALL: tuple[type[Rule], ...] = (
    DifferenceRule, ChangeRule, OrderRule, BoundRule, CountRule, CorrelationRule, RankRule, GapRule, TrendRule,
    RateRule,
)  # fmt: skip
RULES: dict[str, type[Rule]] = {rule.kind: rule for rule in _ALL}

VERSION = 1
"""Part of every rule's hash; incremented when the meaning of a rule changes, which invalidates earlier rows."""


def read_rule(table: Any, where: str) -> Rule:
    """Build the rule of a TOML table; `where` is its location for error messages."""
    if not isinstance(table, Mapping) or "kind" not in table:
        raise NormLabError(f"{where} has no kind; expected one of {', '.join(RULES)}")
    kind = str(table["kind"])
    if kind not in RULES:
        raise unknown(f"kind of rule in {where}", kind, RULES)
    values = {name: value for name, value in table.items() if name != "kind"}
    known = hints(RULES[kind])
    missing = [name for name in known if name not in values and not hasattr(RULES[kind], name)]
    if missing:
        raise NormLabError(f"{where}: a rule of kind {kind} needs {missing[0]!r}; add it to the rule")
    return from_plain(RULES[kind], values, where)
