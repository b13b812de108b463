"""RunExecutor: the worker processes of one or several comparisons, and how long runs take in them."""

from __future__ import annotations

from normlab.compare.durations import RunDurations
from normlab.compare.pool import Pool
from normlab.compare.ray_pool import RayPool
from normlab.compare.run_options import RunSettings
from normlab.compare.workers import ProcessPool, worker_slots


class RunExecutor:
    """Starts worker processes when they are first needed and keeps them until it is closed.

    The arms of a study share one: a process that has compiled a model for one arm has it for the next.
    """

    def __init__(self) -> None:
        self.durations = RunDurations()
        self._pool: Pool | None = None
        self._settings: RunSettings | None = None

    def pool(self, settings: RunSettings) -> Pool:
        """The pool of these settings; that of others is closed."""
        if self._pool is None or settings != self._settings:
            self.close()
            self._pool, self._settings = _new_pool(settings), settings
        return self._pool

    def close(self) -> None:
        """End all processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _new_pool(settings: RunSettings) -> Pool:
    return RayPool(settings) if settings.options.on == "ray" else ProcessPool(worker_slots(settings))
