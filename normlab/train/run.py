"""Load a stored run: `run = normlab.load_run("runs/peri")`; `run.model`, `run.metrics("eval")`, `run.generate()`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from normlab.data import Tokenizer, load_tokenizer
from normlab.errors import NormLabError
from normlab.models.transformer import Transformer
from normlab.train.config import TrainConfig, check_seed
from normlab.train.distributed import pick_device
from normlab.train.storage.checkpoint import Checkpoints
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import read_records
from normlab.train.storage.weights import load_weights, read_metadata
from normlab.utils.files import read_json


def load_run(folder: str | Path, *, device: str = "cpu") -> Run:
    """Load a trained run, with model and tokenizer, from a folder made by `normlab train` or `normlab compare`."""
    run = Run(RunFolder(Path(folder)), pick_device(device))
    run.folder.config  # noqa: B018  # raises for a folder that is no run
    return run


class Run:
    """A stored run: configuration, metrics, tokenizer, and the model of its last checkpoint or its end."""

    def __init__(self, folder: RunFolder, device: torch.device):
        self.folder, self.device = folder, device

    @property
    def status(self) -> dict[str, Any]:
        return self.folder.status

    @cached_property
    def config(self) -> TrainConfig:
        """Configuration of the run, with the vocabulary size if it was known when the file was written."""
        if self._is_under_way:
            extra = read_json(self._newest / "state.json")["extra"]
            # Version 0.1 left it out.
            return TrainConfig.from_dict(extra["config"]) if "config" in extra else self._from_data()
        if self.folder.weights.is_file():
            return TrainConfig.from_dict(read_metadata(self.folder.weights)["config"])
        return self.folder.config

    @property
    def _newest(self) -> Path:
        return Checkpoints(self.folder.checkpoints).latest() or self.folder.path

    @property
    def _is_under_way(self) -> bool:
        """Whether there is a checkpoint and the run has not ended."""
        return self.status["state"] != "done" and self._newest != self.folder.path

    def _from_data(self) -> TrainConfig:
        config = self.folder.config
        return config.for_data(config.task_object.open(config, progress=False))

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The records of a kind (step, eval, profile, event), or all of them."""
        return [record for record in read_records(self.folder.metrics) if kind in (None, record["kind"])]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a run on text."""
        if not self.folder.tokenizer.is_file():
            # Version 0.1 wrote it at the end of a run.
            return self.config.task_object.open(self.config, progress=False).tokenizer
        return load_tokenizer(self.folder.tokenizer)

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes of images, in the order of the logits."""
        return read_json(self.folder.classes)

    @cached_property
    def model(self) -> Transformer:
        """The model with its weights at the end of the run, or at its newest checkpoint, ready to evaluate."""
        under_way = self._is_under_way
        if not under_way and not self.folder.weights.is_file():
            raise NormLabError(
                f"{self.folder.path} has no weights and no checkpoint yet (it is {self.status['state']}); "
                f"let it go on: normlab train --resume {self.folder.path}"
            )
        model, transfer = self.config.design.build(device=self.device), self.config.transfer
        if transfer is not None:
            transfer.attach_(model)
        if under_way:
            Checkpoints(self.folder.checkpoints).load_weights(model)
        else:
            load_weights(self.folder.weights, model)
        return model.eval()

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Continue the prompt by up to `tokens` sampled tokens, or to the end of the document."""
        write = getattr(self.model, "generate", None)
        if write is None:
            raise NormLabError(
                f"{self.folder.path} holds a model of the task {self.config.task}, which writes no text; "
                f"name a run of the task language"
            )
        if seed is not None:
            check_seed(seed)
        ids, end = self._prompt_tokens(prompt), self.tokenizer.end
        room = self.config.model.sequence - len(ids)
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        found = write(
            torch.tensor([ids], device=self.device), min(tokens, room), temperature=temperature, top_k=top_k,
            top_p=top_p, stop=end, generator=generator,
        )  # fmt: skip
        made = found[0, 1:].tolist()
        # The vocabulary is padded: tokens that the tokenizer does not have are dropped.
        return self.tokenizer.decode([token for token in made if token != end and token < self.tokenizer.vocab_size])

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """The tokens that generation starts from; raises if they leave no room for another."""
        # Undecodable bytes of the command line arrive as lone surrogates.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise NormLabError("the prompt holds bytes that are not UTF-8; expected whole characters")
        # A document follows the end token of another, as in training.
        ids = [self.tokenizer.end, *self.tokenizer.encode(prompt).tolist()]
        most = self.config.model.sequence - 2
        if len(ids) - 1 > most:
            raise NormLabError(f"the prompt has {len(ids) - 1} tokens and the model takes {most} at most; shorten it")
        return ids
