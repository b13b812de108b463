"""The command line: parse, call, print. Nothing here imports torch before a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from normlab import __version__
from normlab.errors import NormLabError

_DESCRIPTION = """Choose, check, train and understand how the layers of a Transformer are normalised.

Examples:
  normlab schemes                   the table of all schemes
  normlab schemes geonorm           everything about one
  normlab schemes "peri(step=0.1)"  the same, with options
  normlab doctor                    what this machine can run, and why not
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


def main() -> None:
    """Entry point of the `normlab` command. Bad input: one line, exit code 2."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"normlab {__version__}")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"schemes": schemes, "doctor": doctor}, prog="normlab", description=_DESCRIPTION
        )
    except NormLabError as error:
        print(f"normlab: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)


if __name__ == "__main__":
    main()
