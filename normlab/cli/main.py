"""The command line: parse, call, print. Nothing here imports torch before a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from normlab import __version__
from normlab.checks.config import CheckConfig
from normlab.cli import flags
from normlab.cli.bench import bench_kernels, bench_step
from normlab.cli.study import study
from normlab.cli.subcommands import for_task, refuse_empty_paths, verb_kinds
from normlab.compare.config import CompareConfig
from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import EXPERIMENTS
from normlab.errors import NormLabError, unknown
from normlab.train.config import DEFAULT_TASK, TrainConfig
from normlab.train.tasks import find_task
from normlab.utils.settings import blamed

_DESCRIPTION = """Choose, check, train and understand how the layers of a Transformer are normalised.

Examples:
  normlab schemes                   the table of all schemes
  normlab schemes geonorm           everything about one
  normlab schemes "peri(step=0.1)"  the same, with options
  normlab train --scheme peri       one run on the built-in text, resumable
  normlab compare                   pre, post, peri and geonorm side by side, ending in a page
  normlab check peri                will it explode, vanish or collapse when it is deep?
  normlab simulate --scheme peri    what theory says it does to tokens through depth
  normlab report DIR                the page of a comparison or a run
  normlab study                     published claims, and what our runs say of them
  normlab generate --run DIR        text from a trained model
  normlab export RUN DIR            a trained model as a Hugging Face folder
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
        name: A scheme, an alias, or either with options: geonorm, sandwich, "peri(step=0.1)"; highway.py:Highway.
        json: Print JSON for other programs.
    """
    from normlab.schemes.catalog import terminal

    terminal.schemes(as_json=json) if name is None else terminal.card(name, as_json=json)


def doctor(json: bool = False) -> None:
    """Print device, versions, and which kernels can run or why they cannot.

    Args:
        json: Print JSON for other programs.
    """
    from normlab.cli import doctor

    doctor.print_findings(as_json=json)


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


def compare(
    config: CompareConfig,
    out: Path = Path("comparison"),
    preset: str | None = None,
    toml: Path | None = None,
    minutes: float | None = None,
) -> None:
    """Train several schemes under the same conditions and say which is best, and how sure that is.

    Each scheme's learning rate is searched on runs of their own; other seeds judge it. Run it again to go on.
    The exit code is 1 where runs failed or stayed interrupted, 130 where it was stopped before the end, else 0.

    For instance:
      normlab compare --schemes pre peri geonorm --lrs 3e-4 1e-3 3e-3 --seeds 5 --data book.txt --tokens 10M
      normlab compare --preset 125m --data "books/*.jsonl.xz" --tokens 33M --minutes 9
      normlab compare --task images --preset digits --images 60k --batch 64

    Args:
        config: The comparison.
        out: Folder of the comparison.
        preset: Size of the models (tiny, 125m, 350m, 1.3b; for images digits, vit-s, vit-b); other flags change it.
        toml: File with any of these settings; flags come after it.
        minutes: Stop after so long, to go on another time.
    """
    from normlab.compare.comparison import compare as run
    from normlab.compare.outcome import outcome
    from normlab.compare.report import build, terminal

    run(config, out, minutes=minutes, command=["normlab", *sys.argv[1:]])
    page, ended = build(out), outcome(config, out)
    print(*ended.lines, f"page: {page}", sep="\n")
    terminal.print_ranking(out)
    sys.exit(ended.exit_code)


def check(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")],
    /,
    config: CheckConfig,
    against: str | None = None,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Say whether a design will explode, vanish or collapse when it is deep, which layers are to blame, what to change.

    For instance:
      normlab check "peri(step=0.1)" --against post
      normlab check path/to/config.json --shrink 16 --html page.html
      normlab check package.module:factory --depths 12,24,48 --fail-on exploding,unsteady

    The exit code is 1 where something fails that --fail-on names, 2 where the target cannot be checked.

    Args:
        target: A scheme with options, one in a file (highway.py:Highway), a Hugging Face id, a config.json,
            module:factory (a function of depth and width that returns a model), or the folder of a run.
        config: The check.
        against: Another target, to be checked in the same way and shown beside the first.
        json: Keep everything in this file.
        html: Write a page with the curves into this file.
    """
    from normlab.checks.check import check as run
    from normlab.checks.check import prepare, share_reference
    from normlab.checks.view import card
    from normlab.checks.view import side_by_side as pair
    from normlab.utils.files import writable

    kept = [writable(path, suffix) for path, suffix in ((json, ".json"), (html, ".html")) if path is not None]
    targets = [prepare(name, config) for name in (target, against) if name is not None]
    results = [run(one, config=config, progress=True, command=["normlab", *sys.argv[1:]]) for one in targets]
    shown = results[0] if against is None else pair.Against(*share_reference(*results))
    card.show(shown)
    for path in kept:
        print(f"{path.suffix[1:]}: {shown.save(path)}")
    sys.exit(1 if shown.failed(config.fail_on) else 0)


def simulate(
    experiment: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")] = None,
    /,
    config: SimulateConfig = SimulateConfig(),  # noqa: B008  # frozen
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Follow tokens through depth as particles on a sphere, and hold what they do against theory.

    For instance:
      normlab simulate --scheme post,pre,peri --html page.html
      normlab simulate --scheme peri --tokens 256 --dim 512 --beta 5
      normlab simulate speed-laws
      normlab simulate real-model --model runs/peri-1 --html page.html

    Experiments have defaults of their own, which flags change:
      {experiments}

    Args:
        experiment: One of those above; without it a free run.
        config: The simulation.
        json: Keep everything in this file.
        html: Write a page with the moving tokens and the curves into this file.
    """
    from normlab.dynamics.command import run_command
    from normlab.dynamics.view import card
    from normlab.utils.files import writable

    kept = [writable(path, suffix) for path, suffix in ((json, ".json"), (html, ".html")) if path is not None]
    result = run_command(experiment, config, command=["normlab", *sys.argv[1:]])
    card.print_result(result)
    for path in kept:
        print(f"{path.suffix[1:]}: {result.save(path)}")


# Formatting by hand: a docstring is no f-string.
simulate.__doc__ = (simulate.__doc__ or "").replace(
    "{experiments}", "\n      ".join(f"{one.name:<16} {one.about}" for one in EXPERIMENTS.values())
)


def report(folder: Annotated[Path, tyro.conf.Positional], /, out: Path | None = None, markdown: bool = False) -> None:
    """Make the page of a comparison or of a single run.

    Args:
        folder: Made by normlab compare or normlab train.
        out: Where the page goes; without it report.html in the folder. With markdown, where the table goes.
        markdown: Print a table for a paper or a pull request instead.
    """
    from normlab.compare import report as reports
    from normlab.utils.files import save

    if not markdown:
        print(f"page: {reports.build(folder, out=out)}")
    elif out is None:
        print(reports.markdown(folder))
    else:
        print(f"table: {save(out, {'.md': lambda: reports.markdown(folder)})}")


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


def bench() -> None:
    """Measure speed: `bench kernels` for the fused steps, `bench step` for whole training steps."""


_VERBS: dict[str, Callable[..., None]] = {
    "schemes": schemes,
    "train": train,
    "compare": compare,
    "check": check,
    "simulate": simulate,
    "study": study,
    "report": report,
    "generate": generate,
    "export": export,
    "doctor": doctor,
    "bench": bench,
}
_BENCHES: dict[str, Callable[..., None]] = {"kernels": bench_kernels, "step": bench_step}
# What a TOML file may set for a verb, besides the fields of the task's model.
_SETTINGS: dict[str, tuple[type, ...]] = {"train": (TrainConfig,), "compare": (CompareConfig, TrainConfig)}


def main() -> None:
    """Entry point of the `normlab` command. Bad input: one line, exit code 2."""
    words = sys.argv[1:]
    if words in (["--version"], ["-V"]):
        print(f"normlab {__version__}")
        return
    try:
        _run(words)
    except NormLabError as error:
        print(f"normlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("normlab: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)


def _run(words: list[str]) -> None:
    file: str | None = None
    stored: TrainConfig | None = None
    given: list[str] = []
    refuse_empty_paths(words, {**_BENCHES, **_VERBS})
    verbs, prog, description, task = _VERBS, "normlab", _DESCRIPTION, find_task(DEFAULT_TASK)
    if words[:1] == ["bench"]:
        verbs, prog, description, words = _BENCHES, "normlab bench", bench.__doc__ or "", words[1:]
    elif words[:1] and words[0] in _SETTINGS:
        file, given = flags.value_of(words, "--toml"), words[1:]
        stored = _stored(flags.value_of(given, "--resume")) if words[0] == "train" else None
        default_task = DEFAULT_TASK if stored is None else stored.task
        rest, task = flags.expand(given, _SETTINGS[words[0]], verb_kinds(_VERBS[words[0]]), default_task)
        words = [words[0], *rest]
    elif words[:1] == ["simulate"]:
        named = next((EXPERIMENTS[word] for word in words if word in EXPERIMENTS), None)
        verbs = {**_VERBS, "simulate": partial(simulate, config=named.defaults)} if named else _VERBS
    if words and not words[0].startswith("-") and words[0] not in verbs:
        raise unknown("benchmark" if verbs is _BENCHES else "verb", words[0], verbs)
    typed = {name: for_task(verb, task, stored) if name in _SETTINGS else verb for name, verb in verbs.items()}
    refuse_empty_paths(words, verbs)
    with blamed(file, given):
        act = tyro.extras.subcommand_cli_from_dict(
            typed, prog=prog, description=description, args=words, config=(tyro.conf.OmitArgPrefixes,)
        )
    if act is not None:
        act()


def _stored(folder: str | None) -> TrainConfig | None:
    """The configuration of the run that is to be resumed."""
    if folder is None:
        return None
    from normlab.train.storage.folder import RunFolder

    return RunFolder(Path(folder)).config


if __name__ == "__main__":
    main()
