"""The commands for one run: `normlab train`, `generate` and `export`. Importing this does not import torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from normlab.errors import NormLabError
from normlab.train.config import TrainConfig


def train(
    config: TrainConfig,
    out: Path | None = None,
    resume: Path | None = None,
    branch_from: Path | None = None,
    preset: str | None = None,
    toml: Path | None = None,
) -> None:
    """Train one model. The same command again resumes an interrupted run.

    The --task is language (a decoder on text), masked (an encoder on text) or images (a vision Transformer).
    The options below are those of one task: see also --task masked --help and --task images --help.

    For example:
      normlab train --scheme geonorm --data book.txt --tokens 5M
      normlab train --task masked --scheme post --data book.txt
      normlab train --task images --scheme peri --data photographs/ --image-size 64 --channels 3 --patch 8
      normlab train --preset 125m --scheme peri --data "books/*.jsonl.xz" --tokenizer bpe:32768 --tokens 1B --lr 6e-4
      normlab train --resume runs/large
      normlab train --resume runs/large --tokens 2B
      normlab train --data book.txt --schedule wsd --warmup 100 --tokens 40M --branches 10M 20M --out runs/trunk
      normlab train --branch-from runs/trunk --tokens 10M --out runs/short
      torchrun --nproc-per-node 8 -m normlab train --preset 1.3b --toml run.toml --out runs/large

    Args:
        config: Configuration of the run.
        out: Folder of the run; none: runs/SCHEME-lrLR-seedSEED-HASH.
        resume: Folder of a run to resume; its settings are read from there. With larger --tokens or --images,
            continue a finished run, with its learning-rate schedule stretched over all steps.
        branch_from: Folder of a run with --branches; start from the state that it kept for --tokens or --images, with
            its other settings. The result is that of a run with this budget from the start.
        preset: Model size: tiny, 125m, 350m, 1.3b; for images digits, vit-s, vit-b. Other flags override it.
        toml: TOML file with any of these options; flags override it.
    """
    from normlab.train.result import ending
    from normlab.train.resume import resumed
    from normlab.train.trainer import train as run

    if resume is not None and out is not None:
        raise NormLabError("--resume names the folder of the run already; leave out --out")
    if resume is not None and branch_from is not None:
        raise NormLabError(
            "--resume goes on with a run, --branch-from starts one; to resume a branch leave the latter out"
        )
    folder = resume or out or Path("runs") / config.name
    config = config if resume is None else resumed(resume, config)
    result = run(
        config, folder, command=["normlab", *sys.argv[1:]], continuable=config.saves > 0, branch_from=branch_from
    )
    if os.environ.get("RANK", "0") == "0":
        print(ending(result, config.task_object, folder))
    sys.exit({"done": 0, "failed": 1, "stuck": 1, "stopped": 130}[result.state])


def generate(
    run: Path,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> None:
    """Generate text with a trained language model.

    For example:
      normlab generate --run runs/peri --prompt "def " --tokens 100 --temperature 0.5

    Args:
        run: Folder of a run; the newest checkpoint of one that is not finished.
        prompt: Beginning of the text.
        tokens: Tokens to generate, at most.
        temperature: Sampling temperature; 0: always the most likely token.
        top_k: Sample from the K most likely tokens.
        top_p: Nucleus sampling: sample from the most likely tokens with this total probability.
        seed: Random seed of the sampling.
        device: Device: cpu, cuda.
    """
    if tokens < 1:
        raise NormLabError(f"--tokens must be at least 1, got {tokens}; try 200")
    from normlab.train.run import load_run

    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    print(load_run(run, device=device).generate(prompt, tokens=tokens, **options))


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    /,
    overwrite: bool = False,
) -> None:
    """Export a trained model as a Hugging Face transformers folder: weights, tokenizer, model card.

    For example:
      normlab export runs/peri peri-for-transformers

    Args:
        run: Folder of a finished run.
        folder: Folder to write.
        overwrite: Replace an existing export.
    """
    from normlab.hf import export

    print(f"model: {export(run, folder, overwrite=overwrite)}")
