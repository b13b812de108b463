"""compare.json: the configuration of a comparison folder; a call with another configuration is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.compare.bracket import Bracket, grid_index
from normlab.compare.config import CompareConfig
from normlab.errors import NormLabError
from normlab.train.config import DEFAULT_TASK, LATER_DEFAULTS, not_decisive
from normlab.train.tasks import Data
from normlab.utils.files import read_json, write_json
from normlab.utils.results_folder import COMPARISON
from normlab.utils.versions import versions


def write_description(folder: Path, config: CompareConfig, data: Data, command: Sequence[str]) -> None:
    """Write compare.json; raise if an existing one is neither equal nor extended by this one."""
    path = folder / COMPARISON
    new = config.to_dict() | {
        "metric": config.base.task_object.metric.name, "tokens": config.base.tokens_in_all, "corpus": data.facts(),
        "parameters": _parameters(config, data), "versions": versions(), "command": list(command),
    }  # fmt: skip
    if isinstance(config.bracket, Bracket):
        new["rates"] = {"first": list(config.bracket.first), "limits": list(config.bracket.limits)}
    if path.is_file() and _has_begun(folder) and (wrong := _fault(read_json(path), new)):
        raise NormLabError(f"{folder} holds another comparison: {wrong}; choose another folder, or remove this one")
    write_json(path, new)


def _parameters(config: CompareConfig, data: Data) -> dict[str, int]:
    """Number of parameters of the model with each scheme, with the vocabulary or the classes of the data."""
    from normlab.models.estimate import num_params

    lr = config.first_rates[0]
    return {name: num_params(config.run(name, lr, 0).for_data(data).model) for name in config.names}


def _has_begun(folder: Path) -> bool:
    """Whether the folder has results; if it failed before its first run, the configuration may change."""
    return (folder / "rows.jsonl").is_file() or any(folder.glob("runs/*/metrics.jsonl"))


def _fault(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first difference by which `new` is neither equal to `old` nor an extension of it; None if there is none."""
    try:
        return _shrunk(old, new) or _rewritten(old, new) or _changed(old, new)
    except (KeyError, TypeError, AttributeError):
        return f"its {COMPARISON} cannot be read"


def _shrunk(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    searched = new["lrs"] == "auto"
    # A search goes on from rates that were listed, if they are rates that it could have tried itself.
    if old["lrs"] != new["lrs"] and (old["lrs"] == "auto" or (searched and None in map(grid_index, old["lrs"]))):
        return f"its lrs is {old['lrs']!r}, not {new['lrs']!r}"
    if old.get("widen_rates") and not (searched or new.get("widen_rates")):
        return "its rates are widened beyond the list, and these would not be"
    for name in ("schemes",) if searched else ("schemes", "lrs"):
        missing = [value for value in old[name] if value not in new[name]]
        if missing:
            return f"its {name} have {missing[0]}, which is not among those given (it can grow, but not shrink)"
    for name in ("seeds", "tune_seeds"):
        if new[name] < old[name]:
            return f"its {name} is {old[name]}, not {new[name]} (it can grow, but not shrink)"
    return None


def _rewritten(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Find a scheme from a user's file whose content has changed since its rows were made."""
    before, after = old.get("sources", {}), new.get("sources", {})
    name = next((name for name in old["schemes"] if before.get(name) != after.get(name)), None)
    return name and f"its scheme {name} was {before.get(name, 'of NormLab')}, not {after.get(name, 'of NormLab')}"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    before, after = _decisive(old), _decisive(new)
    name = next((name for name in after if before.get(name) != after[name]), None)
    if name == "corpus":
        return "its data has changed since it began"
    return name and f"its {name} is {before.get(name)!r}, not {after[name]!r}"


def _decisive(about: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that must not change, as one flat dictionary."""
    # Version 0.1 had no task and lacked some fields.
    base = {"task": DEFAULT_TASK, **LATER_DEFAULTS, **about["base"]}
    fields = {"baseline": about["baseline"], "level": about["level"], **base, **base["model"]}
    kept = {name: value for name, value in fields.items() if name not in (*not_decisive(base["trouble"]), "model")}
    return kept | {"corpus": about["corpus"]["fingerprint"]}
