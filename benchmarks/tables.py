"""The tables of benchmarks/README.md, made from the dated results beside it: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def kernels(rows: list[dict[str, Any]]) -> str:
    """One line per step and shape, both directions."""
    head = "| step | shape | share of copy, forward | backward | × `torch.compile`, forward | backward | × Liger |"
    lines = [head, "|" + "---|" * 7]
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        pair = (forward, backward)
        cells = [f"{row['share']:.2f}" for row in pair] + [f"{row['over_compiled']:.2f}" for row in pair]
        liger = " / ".join(f"{row['over_liger']:.2f}" for row in pair if "over_liger" in row) or "–"
        lines.append("| " + " | ".join([forward["case"], " × ".join(map(str, forward["shape"])), *cells, liger]) + " |")
    return "\n".join(lines)


def steps(rows: list[dict[str, Any]]) -> str:
    """One line per scheme, beside the faster Pre-Norm."""
    lines = ["| scheme | kernels | tokens/s | × the faster Pre-Norm | lowest to highest | memory × |", "|" + "---|" * 6]
    for row in rows:
        span = f"{min(row['paired']):.3f} to {max(row['paired']):.3f}"
        cells = [f"{row['median']:,.0f}", f"{row['over_pre']:.3f}", span, f"{row['memory_over_pre']:.3f}"]
        lines.append(f"| {row['scheme']} | {row['kernels']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def model_kernels(rows: list[dict[str, Any]]) -> str:
    """One line per kernel."""
    lines = ["| kernel | µs | share of copy | × `torch.compile` |", "|" + "---|" * 4]
    for row in rows:
        cells = [f"{1e6 * row['fused']['median']:.1f}", f"{row['share']:.2f}", f"{row['over_compiled']:.2f}"]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    makers = {"kernels": kernels, "step": steps, "model-kernels": model_kernels}

    def table(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        rows = json.loads((HERE / "results" / name).read_text(encoding="utf-8"))["rows"]
        return f"<!-- {kind}: {name} -->\n{makers[kind](rows)}\n<!-- end -->"

    pattern = r"<!-- (?P<kind>[a-z-]+): (?P<name>\S+) -->\n.*?<!-- end -->"
    page.write_text(re.sub(pattern, table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
