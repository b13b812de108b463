"""`HFCallback`: profile and judge every n-th step of Hugging Face's Trainer.

Trainer(model=model, ..., callbacks=[normlab.checks.HFCallback(every=50, out="profiles.jsonl")])
"""

from __future__ import annotations

from typing import Any

from normlab.checks.callbacks import Watch
from normlab.errors import NormLabError

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise NormLabError('HFCallback needs transformers; pip install "normlab[hf]"') from error


class HFCallback(TrainerCallback):
    """A `Watch` on the model that a Trainer trains; options are those of `Watch`."""

    def __init__(self, every: int = 50, **options: Any):
        self._every, self._options = every, options
        self.watch: Watch | None = None
        """The watch, once training has begun: its last profiles and verdicts, and what broke."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        self.watch = Watch(model, every=self._every, **self._options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.close()
