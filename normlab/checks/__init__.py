"""Stability checks: train short bursts at several depths, judge growth, collapse and faults, and say what to change.

target -> burst (training, two profiles) -> ladders (depths, widths, rates) -> laws, theory -> verdicts -> remedies

`normlab.check` does all of it; `Watch` and `HFCallback` judge the profiles of other people's training loops.
`normlab.check_coordinates` fits how activations, and their changes in training, depend on width and depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.checks.callbacks import Watch
    from normlab.checks.config import CheckConfig
    from normlab.checks.coordinates.records import CoordinateCheck
    from normlab.checks.hf_callback import HFCallback
    from normlab.checks.judge.ladder_verdicts import judge_ladder
    from normlab.checks.judge.thresholds import Thresholds
    from normlab.checks.judge.verdict import Verdict
    from normlab.checks.ladder_records import Ladder
    from normlab.checks.result import Check
    from normlab.checks.theory.records import Theory

__all__ = [
    "Check",
    "CheckConfig",
    "CoordinateCheck",
    "HFCallback",
    "Ladder",
    "Theory",
    "Thresholds",
    "Verdict",
    "Watch",
    "judge_ladder",
]

# No name here may be that of a module of this package: whoever imports the module would replace it.
__getattr__ = loader(
    __name__,
    {
        "Check": "result",
        "CheckConfig": "config",
        "CoordinateCheck": "coordinates.records",
        "HFCallback": "hf_callback",
        "Ladder": "ladder_records",
        "Theory": "theory.records",
        "Thresholds": "judge.thresholds",
        "Verdict": "judge.verdict",
        "Watch": "callbacks",
        "judge_ladder": "judge.ladder_verdicts",
    },
)
