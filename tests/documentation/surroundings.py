"""The files that commands of the documentation name: a book, books, images, a scheme, a factory, a table of losses."""

from __future__ import annotations

import csv
import json
import lzma
import shutil
from pathlib import Path

from tests.documentation.commands import ROOT

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind. " * 400
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
HIGHWAY = '''
from dataclasses import dataclass

import math

from normlab.schemes import Add, Law, Scheme, Step


@dataclass(frozen=True, kw_only=True)
class Highway(Scheme):
    """
    Highway: a residual whose update is damped by a constant.

    Formula    x ← x + σ(gate)·F(N(x))
    Placement  x ─ N ─ F ─ + ─ x'
    Init       base std
    Source     a test
    Law        random walk
    Fails      never tried
    """

    name = "own"
    gate: float = 0.0
    """Damping before the sigmoid."""

    def sublayer(self, site):
        return Step(Add(site.dt / (1 + math.exp(-self.gate))), read=self.new_norm(site.dim))

    def law(self, depth):
        return Law(speed=None, rms=lambda i: math.sqrt(1 + i), forward="random walk", backward="power law in depth")
'''
FACTORY = """
import normlab


def factory(depth, width):
    return normlab.Decoder(normlab.DecoderConfig(depth=depth, dim=width, heads=2, vocab_size=64, max_length=64))
"""


def write_surroundings(folder: Path) -> None:
    """Write all of them into a folder, in which the commands are then run."""
    (folder / "book.txt").write_text(TEXT)
    (folder / "highway.py").write_text(HIGHWAY)
    (folder / "books").mkdir()
    records = "".join(json.dumps({"text": f"book {number}: {TEXT[number:4000]}"}) + "\n" for number in range(40))
    (folder / "books" / "a.jsonl.xz").write_bytes(lzma.compress(records.encode()))
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "module.py").write_text(FACTORY)
    (folder / "examples").mkdir()
    source = ROOT / "examples" / "custom_scheme.py"
    for copy in ("examples/custom_scheme.py", "custom_scheme.py", "my_package/schemes.py"):
        (folder / copy).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / copy)
    (folder / "my_package" / "__init__.py").touch()
    shutil.copytree(ROOT / "studies", folder / "studies")
    _losses(folder / "losses.csv")
    (folder / "cloze").mkdir()
    question = {"start": "the quick brown", "ends": [" fox", " dog"], "answer": 0, "document": "a"}
    (folder / "cloze" / "cloze_books.jsonl").write_text(json.dumps(question) + "\n")


def _losses(path: Path) -> None:
    """Losses of a power law in size and budget, two schemes, two seeds."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["scheme", "parameters", "tokens", "flops", "seed", "loss"])
        for size in (1e6, 3e6, 1e7, 3e7):
            for budget in (2e7, 6e7, 2e8):
                for seed in (0, 1):
                    loss = 1.7 + 400 / size**0.34 + 410 / budget**0.28 + 1e-3 * seed
                    start = [int(size), int(budget), 6 * size * budget, seed]
                    rows.writerow(["pre", *start, loss])
                    rows.writerow(["peri", *start, loss - 0.02])


def write_images(folder: Path) -> None:
    """Folders of images, a class each. Needs Pillow."""
    from PIL import Image

    for blue, part in enumerate(("photographs", "held-out")):
        for k, name in enumerate(("dark", "light")):
            (folder / part / name).mkdir(parents=True)
            for number in range(24):
                grey = 40 + 120 * k + number
                Image.new("RGB", (64, 64), (grey, grey, blue)).save(folder / part / name / f"{number}.png")
