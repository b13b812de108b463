"""Schemes that a rule judges through an experiment: its rows are of the experiment, which simulates several schemes.

A rule about a number of one scheme names it in its path ("result.verdicts.peri: speed at the start.measured"). A rule
about the whole experiment judges the schemes that the study's settings give it. Where neither names a scheme, the claim
is about none in particular.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from normlab.schemes.catalog.cited_claims import Role
from normlab.studies.rules.base import Rule
from normlab.studies.study import Study, Table

_OF_SCHEME = re.compile(r"\bverdicts\.([^:/]+): ")
"""The scheme in the path of one verdict of an experiment."""


def judged_through(study: Study, rule: Rule) -> dict[str, Role]:
    """Specs of the schemes by their role; empty if the rule is not about an experiment."""
    runs = [settings for settings in _arms(study, rule) if settings.get("experiment") in rule.schemes]
    if not runs:
        return {}
    over, _, under = str(getattr(rule, "value", "")).partition(" / ")
    named: dict[str, Role] = dict.fromkeys(_OF_SCHEME.findall(under), "compared")
    named.update(dict.fromkeys(_OF_SCHEME.findall(over), "subject"))
    return named or {spec: "subject" for settings in runs for spec in _specs(settings)}


def _arms(study: Study, rule: Rule) -> Iterator[Table]:
    """Settings of the arms that the rule is about."""
    for arm in study.arms:
        if not rule.arms or any(fnmatchcase(arm, pattern) for pattern in rule.arms):
            yield study.settings_of(arm)


def _specs(settings: Table) -> list[str]:
    found = settings.get("scheme", [])
    return [found] if isinstance(found, str) else list(found)
