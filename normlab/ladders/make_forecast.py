"""The forecast of a ladder's largest size from the rows of the others."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.compare.store import Row
from normlab.errors import NormLabError
from normlab.ladders.fitted_rows import hash_of_rows, losses_by_name
from normlab.ladders.forecast import StoredForecast
from normlab.ladders.places import places
from normlab.ladders.plan import LadderPlan
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics import forecast
from normlab.ladders.statistics.cells import LARGEST_GAP, cells_of, largest_gap, reasons_of
from normlab.ladders.stored_rows import judged_rows
from normlab.train.storage.folder import now
from normlab.utils.versions import versions


def make_forecast(plan: LadderPlan, rows: Sequence[Row], schemes: Sequence[str]) -> StoredForecast:
    """The forecast of these schemes; one that no row allows has a reason in its place."""
    config, known, top = plan.config, versions(), plan.config.rungs[-1]
    judged = judged_rows(rows, set_aside=plan.set_aside(rows))
    fitted = [row for row in judged if row.size != str(top.size)]
    about = {
        "written": now(), "commit": known.get("commit"), "versions": known, "baseline": config.baseline_name,
        "level": config.level, "size": str(top.size), "made_from": hash_of_rows(fitted), "rows": len(fitted),
        "losses": losses_by_name(fitted), "schemes": list(schemes),
    }  # fmt: skip
    try:
        found = forecast(
            fitted, baseline=config.baseline_name, cells=places(config, top), seeds=top.seeds, level=config.level
        )
    except NormLabError as error:
        return StoredForecast(**about, reason=str(error)).signed()
    cells = [cell for cell in found if cell.scheme in schemes]
    missing = set(schemes) - {config.baseline_name, *(cell.scheme for cell in cells)}
    without = {name: _why(fitted, name, config.baseline_name) for name in schemes if name in missing}
    reason = None if cells else "the smaller sizes allow none of any scheme"
    return StoredForecast(**about, cells=cells, without=without, reason=reason).signed()


def _why(rows: Sequence[LadderRow], scheme: str, baseline: str) -> str:
    """Why a scheme has no forecast."""
    cells = cells_of(rows, scheme, baseline)
    if largest_gap(cells) >= LARGEST_GAP:
        return f"a gap of {largest_gap(cells):.2f} nats is too large for the assumptions of a forecast"
    reasons = reasons_of(cells)
    return f"no cell at a smaller size counts ({'; '.join(reasons)})" if reasons else "it has no run at a smaller size"
