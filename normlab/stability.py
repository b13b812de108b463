"""Old names of version 0.1: `normlab.stability` is now `normlab.checks`, `normlab.probes` and `normlab.targets`."""

from __future__ import annotations

from normlab.utils.lazy import moved

__getattr__ = moved(
    __name__,
    {
        "Check": "normlab.checks.Check",
        "CheckConfig": "normlab.checks.CheckConfig",
        "HFCallback": "normlab.checks.HFCallback",
        "Ladder": "normlab.checks.Ladder",
        "Profile": "normlab.probes.Profile",
        "Target": "normlab.targets.Target",
        "Theory": "normlab.checks.Theory",
        "Thresholds": "normlab.checks.Thresholds",
        "Verdict": "normlab.checks.Verdict",
        "Watch": "normlab.checks.Watch",
        "judge": "normlab.checks.judge_ladder",
        "measure": "normlab.probes.measure",
        "resolve": "normlab.targets.resolve",
    },
)
