"""Scaling ladders: does the gain of a scheme survive larger models and longer training?

config = LadderConfig(base=TrainConfig(length=128), schemes=("pre", "peri"), sizes=("2x64", "4x64"), budgets=(10**6,))
answer = normlab.ladder(config, "ladder")   # can be stopped at any time; the same call resumes it

In a script the last line stands under `if __name__ == "__main__":`, because runs are processes that import it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.ladders.config import LadderConfig
    from normlab.ladders.rows import LadderRow

__all__ = ["LadderConfig", "LadderRow"]

__getattr__ = loader(__name__, {"LadderConfig": "config", "LadderRow": "rows"})
