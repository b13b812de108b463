"""What is evaluated: a run, or a folder that `normlab export` wrote. Both give a decoder and a tokenizer."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from normlab.data import Tokenizer, load_tokenizer
from normlab.errors import NormLabError, in_one_line
from normlab.models.decoder import Decoder
from normlab.targets import hub
from normlab.train.distributed import pick_device
from normlab.train.run import Run, load_run
from normlab.train.storage.checkpoint import Checkpoints
from normlab.train.tasks import LanguageTrainConfig
from normlab.utils.files import digest, read_json


class Subject(ABC):
    """A trained decoder in a folder."""

    length: int
    """Tokens in a window, unless another number is asked for."""
    longest: int
    """Tokens that the model takes at most."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def identity(self) -> str:
        """A hash of weights, configuration and tokenizer."""
        found = [(file.name, *digest(file)) for file in sorted(self._decisive())]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    @abstractmethod
    def _decisive(self) -> Sequence[Path]:
        """The files that decide every score."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training."""

    @property
    @abstractmethod
    def decoder(self) -> Decoder:
        """The model, ready to evaluate."""

    @abstractmethod
    def for_transformers(self) -> tuple[Any, Any]:
        """Model and tokenizer as objects of transformers."""

    @abstractmethod
    def forget(self) -> None:
        """Release the weights."""


class RunSubject(Subject):
    """A run; its newest checkpoint if it has not ended."""

    def __init__(self, path: Path, device: str):
        super().__init__(path)
        self._device, self._run = device, load_run(path, device=device)
        config = self._run.config
        if config.task != "language":
            raise NormLabError(
                f"{path} is a run of the task {config.task}; only runs of the task language are evaluated"
            )
        config = cast(LanguageTrainConfig, config)
        self.length, self.longest = config.length, config.model.max_length

    def _decisive(self) -> Sequence[Path]:
        folder = self._run.folder
        newest = None if self._run.status["state"] == "done" else Checkpoints(folder.checkpoints).latest()
        weights = [folder.weights] if newest is None else [file for file in newest.iterdir() if file.suffix == ".json"]
        if not all(file.is_file() for file in weights):
            raise NormLabError(
                f"{self.path} has no weights and no checkpoint yet; let it go on: normlab train --resume {self.path}"
            )
        # The weights' file holds the configuration as well; a checkpoint's manifest the hashes of its files.
        return [*weights, *(file for file in (folder.tokenizer,) if file.is_file())]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._run.tokenizer

    @property
    def decoder(self) -> Decoder:
        return cast(Decoder, self._run.model)

    def for_transformers(self) -> tuple[Any, Any]:
        from normlab.hf.exporting.export import for_transformers

        return for_transformers(self._run)

    def forget(self) -> None:
        self._run = Run(self._run.folder, self._run.device)


class ExportSubject(Subject):
    """A folder that `normlab export` wrote."""

    def __init__(self, path: Path, device: str):
        super().__init__(path)
        self._device = pick_device(device)
        self._loaded: Any = None
        self.longest = self.length = read_json(path / "config.json")["model"]["max_length"]

    def _decisive(self) -> Sequence[Path]:
        return [*self.path.glob("*.safetensors"), *self.path.glob("*config.json"), self.path / "tokenizer.json"]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer.json")

    @property
    def _model(self) -> Any:
        from normlab.hf import NormLabForCausalLM

        if self._loaded is None:
            again = "export the run again: normlab export RUN DIR --overwrite"
            with in_one_line(f"{self.path} cannot be loaded", again):
                loaded: Any = NormLabForCausalLM.from_pretrained(
                    self.path, local_files_only=True, output_loading_info=True
                )
            model, report = loaded
            hub.refuse_missing(str(self.path), report["missing_keys"], report["unexpected_keys"])
            self._loaded = model.to(self._device).eval()
        return self._loaded

    @property
    def decoder(self) -> Decoder:
        return self._model.decoder

    def for_transformers(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer

        return self._model, AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def forget(self) -> None:
        self._loaded = None


def open_subject(path: str | Path, device: str) -> Subject:
    """The run or the export in a folder; raises for anything else."""
    path = Path(path)
    about = read_json(path / "config.json") if (path / "config.json").is_file() else None
    if isinstance(about, dict) and "config" in about:
        return RunSubject(path, device)
    if isinstance(about, dict) and about.get("model_type") == "normlab":
        return ExportSubject(path, device)
    what = "does not exist" if not path.exists() else "is neither a run nor an export"
    raise NormLabError(f"{path} {what}; expected a folder made by normlab train, compare or export")
