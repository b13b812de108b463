"""The command `normlab completion`: a script that completes verbs and options in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print the script that completes verbs and options in a shell.

    For example:
      source <(normlab completion bash)

    Args:
        shell: The shell that the script is for.
    """
    from normlab.cli.main import run  # which imports this module

    run(["--tyro-print-completion", shell])
