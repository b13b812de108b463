"""RunExecutor: the worker processes of one or several comparisons, and how long runs take in them."""

from __future__ import annotations

from normlab.compare.durations import RunDurations
from normlab.compare.pool import Pool
from normlab.compare.ray_pool import RayPool
from normlab.compare.run_options import RunSettings
from normlab.compare.workers import ProcessPool, worker_slots

Places = tuple[str, int | None, str, int]


class RunExecutor:
    """Starts worker processes when they are first needed and keeps them until it is closed.

    The arms of a study share one: a process that has compiled a model for one arm has it for the next.
    """

    def __init__(self) -> None:
        self.durations = RunDurations()
        self._pool: Pool | None = None
        self._places: Places | None = None

    def pool(self, settings: RunSettings) -> Pool:
        """The pool that these settings ask for; that of others is closed."""
        places = _places(settings)
        if self._pool is None or places != self._places:
            self.close()
            self._pool, self._places = _new_pool(settings), places
        return self._pool

    def close(self) -> None:
        """End all processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _places(settings: RunSettings) -> Places:
    """What a pool depends on; the options of a comparison hold all else of it as well."""
    return settings.options.on, settings.options.workers, settings.device, settings.at_once


def _new_pool(settings: RunSettings) -> Pool:
    return RayPool(settings) if settings.options.on == "ray" else ProcessPool(worker_slots(settings))
