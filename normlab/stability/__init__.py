"""Stability: what happens to the hidden state and its gradient from block to block, what law it follows, and whether
that ends well when the model is deep.

targets -> burst (training, two looks) -> ladders (over depths, widths, rates) -> laws, theory -> verdicts -> remedies

`normlab.check` does all of it; `normlab.probe` and the names here serve other people's loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.lazy import loader

if TYPE_CHECKING:
    from normlab.stability.callbacks import Watch
    from normlab.stability.config import CheckConfig
    from normlab.stability.hf_callback import HFCallback
    from normlab.stability.probe import measure
    from normlab.stability.profile import Ladder, Profile
    from normlab.stability.result import Check
    from normlab.stability.targets import Target, resolve
    from normlab.stability.theory import Theory
    from normlab.stability.thresholds import Thresholds
    from normlab.stability.verdict import Verdict
    from normlab.stability.verdicts import judge

__all__ = [
    "Check",
    "CheckConfig",
    "HFCallback",
    "Ladder",
    "Profile",
    "Target",
    "Theory",
    "Thresholds",
    "Verdict",
    "Watch",
    "judge",
    "measure",
    "resolve",
]

# No name here may be that of a module of this package: whoever imports the module would replace it.
__getattr__ = loader(
    __name__,
    {
        "Check": "result",
        "CheckConfig": "config",
        "HFCallback": "hf_callback",
        "Ladder": "profile",
        "Profile": "profile",
        "Target": "targets",
        "Theory": "theory",
        "Thresholds": "thresholds",
        "Verdict": "verdict",
        "Watch": "callbacks",
        "judge": "verdicts",
        "measure": "probe",
        "resolve": "targets",
    },
)
