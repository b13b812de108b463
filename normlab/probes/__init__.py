"""Measurements of any model: find its blocks, hook them, and return profiles. No training and no verdicts here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.probes.probe import Probe, measure
    from normlab.probes.profile import Profile

__all__ = ["Probe", "Profile", "measure"]

__getattr__ = loader(__name__, {"Probe": "probe", "Profile": "profile", "measure": "probe"})
