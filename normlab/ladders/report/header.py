"""Header of a ladder's page: sizes, budgets, seeds, data, device and date, as far as they are known."""

from __future__ import annotations

from normlab.ladders.report.content import LadderReport
from normlab.pages.numbers import format_count, join_names, ratio


def header_facts(content: LadderReport) -> list[tuple[str, str]]:
    """Names and values, without those that are not known."""
    design = content.design
    known = [
        ("sizes", _ends(content.sizes)),
        ("tokens", _ends([format_count(tokens) for tokens in content.budgets])),
        ("seeds", _seeds(content)),
        ("runs", str(len(content.rows)) if content.rows else ""),
        ("compute span", _span(content)),
        ("data", design.data or ""),
        ("unique tokens", format_count(design.unique_tokens) if design.unique_tokens else ""),
        ("head", design.head or ""),
        ("device", design.device or ""),
        ("date", (design.date or "")[:10]),
    ]
    return [(name, text) for name, text in known if text]


def _ends(names: list[str]) -> str:
    return " to ".join(dict.fromkeys((names[0], names[-1]))) if names else ""


def _seeds(content: LadderReport) -> str:
    """Number of seeds; sizes with another number are named."""
    numbers = {
        size: len({row.seed for row in content.rows if row.size == size and row.is_usable}) for size in content.sizes
    }
    if not numbers:
        return ""
    usual = max(numbers.values(), key=lambda number: sum(other == number for other in numbers.values()))
    odd: dict[int, list[str]] = {}
    for size, number in numbers.items():
        if number != usual:
            odd.setdefault(number, []).append(size)
    return "; ".join([str(usual), *(f"{number} at {join_names(sizes)}" for number, sizes in odd.items())])


def _span(content: LadderReport) -> str:
    places = [cell.flops for cell in content.cells]
    return f"{ratio(max(places) / min(places))} ×" if len(places) > 1 else ""
