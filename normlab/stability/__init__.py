"""Stability: what happens to the hidden state and its gradient from block to block, what law it follows, and whether
that ends well when the model is deep.

measures -> profile (one snapshot) and ladder (snapshots over depths) -> laws (fits, classes) -> verdicts -> remedies
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.lazy import loader

if TYPE_CHECKING:
    from normlab.stability.probe import measure
    from normlab.stability.profile import Ladder, Profile
    from normlab.stability.remedies import Remedy, remedies
    from normlab.stability.verdicts import Thresholds, Verdict, judge

__all__ = ["Ladder", "Profile", "Remedy", "Thresholds", "Verdict", "judge", "measure", "remedies"]

__getattr__ = loader(
    __name__,
    {
        "Ladder": "profile",
        "Profile": "profile",
        "Remedy": "remedies",
        "Thresholds": "verdicts",
        "Verdict": "verdicts",
        "judge": "verdicts",
        "measure": "probe",
        "remedies": "remedies",
    },
)
