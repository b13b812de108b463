"""The command line: parse, call, print. Nothing here imports torch before a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from normlab import __version__
from normlab.errors import NormLabError

_DESCRIPTION = """Choose, check, train and understand how the layers of a Transformer are normalised.

Examples:
  normlab schemes                   the table of all schemes
  normlab schemes geonorm           everything about one
  normlab schemes "peri(step=0.1)"  the same, with options
  normlab doctor                    what this machine can run, and why not
  normlab bench kernels             fused steps against the memory's speed
  normlab bench step                training steps of every scheme beside Pre-Norm's
"""


def schemes(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    json: bool = False,
) -> None:
    """Print the table of schemes, or the card of one.

    Args:
        name: A scheme, an alias, or either with options: geonorm, sandwich, "peri(step=0.1)".
        json: Print JSON for other programs.
    """
    from normlab import display

    display.schemes(as_json=json) if name is None else display.card(name, as_json=json)


def doctor(json: bool = False) -> None:
    """Print device, versions, and which kernels can run or why they cannot.

    Args:
        json: Print JSON for other programs.
    """
    from normlab import doctor

    doctor.print_findings(as_json=json)


def bench() -> None:
    """Measure speed: `bench kernels` for the fused steps, `bench step` for whole training steps."""


def bench_kernels(only: str = "", cpu: bool = False, out: Path | None = None, plot: Path | None = None) -> None:
    """Time every fused step: share of the copy bandwidth, ratio to eager PyTorch, torch.compile, Liger and quack.

    Args:
        only: Just the steps whose name contains this, e.g. geodesic.
        cpu: Without a GPU: the plain reference against torch.compile.
        out: Keep the figures in this JSON file.
        plot: Draw them into this .svg, .png or .pdf file.
    """
    from normlab.bench import run

    run.kernels(only=only, cpu=cpu, out=out, plot=plot)


def bench_step(
    schemes: tuple[str, ...] = (),
    preset: str = "125m",
    batch: int = 32,
    length: int = 1024,
    stream: Literal["fp32", "bf16"] = "bf16",
    repeats: int = 5,
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time whole training steps of every scheme beside Pre-Norm, compiled, in bf16.

    Args:
        schemes: Which ones; all of them if none is named.
        preset: Size of the model.
        batch: Sequences a step.
        length: Tokens a sequence.
        stream: Number format of the residual stream.
        repeats: How often each scheme has its turn.
        out: Keep the figures in this JSON file.
        plot: Draw them into this .svg, .png or .pdf file.
    """
    from normlab import schemes as known
    from normlab.bench import run

    options = {"batch": batch, "length": length, "stream": stream, "repeats": repeats}
    run.step(schemes or known(), preset=preset, **options, out=out, plot=plot)  # type: ignore[arg-type]


def main() -> None:
    """Entry point of the `normlab` command. Bad input: one line, exit code 2."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"normlab {__version__}")
        return
    try:
        if sys.argv[1:2] == ["bench"]:
            benches = {"kernels": bench_kernels, "step": bench_step}
            tyro.extras.subcommand_cli_from_dict(
                benches, prog="normlab bench", description=bench.__doc__, args=sys.argv[2:]
            )
            return
        tyro.extras.subcommand_cli_from_dict(
            {"schemes": schemes, "doctor": doctor, "bench": bench}, prog="normlab", description=_DESCRIPTION
        )
    except NormLabError as error:
        print(f"normlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("normlab: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)


if __name__ == "__main__":
    main()
