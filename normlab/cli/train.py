"""The verbs on one run: `normlab train`, `generate` and `export`. Importing them imports neither torch nor numpy."""

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
    preset: str | None = None,
    toml: Path | None = None,
) -> None:
    """Train one model; run it again to go on where it was.

    What is learnt is the task: language (a decoder on text), masked (an encoder on text) or images (a vision
    Transformer). Options below are those of the task: --task images --help shows the others.

    For instance:
      normlab train --scheme geonorm --data book.txt --tokens 5M
      normlab train --task masked --scheme post --data book.txt
      normlab train --task images --scheme peri --data photographs/ --image-size 64 --channels 3 --patch 8
      normlab train --preset 125m --scheme peri --data "books/*.jsonl.xz" --tokenizer bpe:32768 --tokens 1B --lr 6e-4
      normlab train --resume runs/large
      normlab train --resume runs/large --tokens 2B
      torchrun --nproc-per-node 8 -m normlab train --preset 1.3b --toml run.toml --out runs/large

    Args:
        config: The run.
        out: Folder of the run; without it runs/ and a name that says what it is.
        resume: Folder of a run to go on with; no other flag is needed. With more tokens or images, a finished run is
            continued: its schedule is stretched over all steps.
        preset: Size of the model (tiny, 125m, 350m, 1.3b; for images digits, vit-s, vit-b); other flags change it.
        toml: File with any of these settings; flags come after it.
    """
    from normlab.train.result import ending
    from normlab.train.resume import resumed
    from normlab.train.trainer import train as run

    if resume is not None and out is not None:
        raise NormLabError("--resume names the folder of the run already; leave out --out")
    folder = resume or out or Path("runs") / config.name
    config = config if resume is None else resumed(resume, config)
    result = run(config, folder, command=["normlab", *sys.argv[1:]], continuable=config.saves > 0)
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
    """Write text with a trained model.

    Args:
        run: Folder of a run; of one that is not finished its newest checkpoint is used.
        prompt: How the text begins.
        tokens: How many tokens to add, at most.
        temperature: 0 always takes the likeliest token; 1 samples as the model believes.
        top_k: Choose among so many likeliest tokens.
        top_p: Choose among the likeliest tokens that make up this probability.
        seed: For the same text again.
        device: Where to compute: cpu, cuda.
    """
    from normlab.train.run import load_run

    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    print(load_run(run, device=device).generate(prompt, tokens=tokens, **options))


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    /,
    overwrite: bool = False,
) -> None:
    """Write a trained model as a folder that Hugging Face's transformers loads: weights, tokenizer, model card.

    For instance:
      normlab export runs/peri peri-for-transformers

    Args:
        run: Folder of a finished run.
        folder: Where the model goes.
        overwrite: Replace an earlier export.
    """
    from normlab.hf import export

    print(f"model: {export(run, folder, overwrite=overwrite)}")
