"""Export a run as a Hugging Face model folder: `normlab export RUN DIR`.

DIR/
config.json, generation_config.json      model configuration, end-of-text token
model.safetensors                        its weights
tokenizer.json, tokenizer_config.json    the run's tokenizer
README.md                                the model card
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from normlab.errors import NormLabError
from normlab.hf.exporting.model_card import model_card
from normlab.hf.exporting.modelling import NormLabForCausalLM
from normlab.hf.exporting.tokenizer import to_fast_tokenizer
from normlab.models.decoder import Decoder
from normlab.train.run import Run, load_run
from normlab.utils.files import replacing_folder, write_atomically


def export(run: str | Path | Run, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a finished run to `folder` atomically; an earlier export there is replaced only with `overwrite`."""
    found = run if isinstance(run, Run) else load_run(run)
    folder = Path(folder)
    _check_target(folder, overwrite)
    model, tokenizer = for_transformers(found)
    with replacing_folder(folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        write_atomically(part / "README.md", model_card(found, model.decoder.config))
    return folder


def for_transformers(run: Run) -> tuple[NormLabForCausalLM, PreTrainedTokenizerFast]:
    """The run's model and tokenizer as objects of transformers; the weights are shared, not copied."""
    decoder = run.model
    if not isinstance(decoder, Decoder):
        raise NormLabError(
            f"{run.folder.path} holds a model of the task {run.config.task}, and only decoders can be exported; "
            f"name a run of the task language"
        )
    tokenizer = to_fast_tokenizer(run.tokenizer, decoder.config.max_length)
    end = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), run.tokenizer.end)
    return NormLabForCausalLM.from_decoder(decoder, base_dim=run.config.base_dim, **end), tokenizer


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.parent.is_dir():
        raise NormLabError(f"{folder.parent} is not a folder; make it first, or choose another one")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not _is_export(folder):
        raise NormLabError(f"{folder} holds something that normlab export did not write; choose another folder")
    if not overwrite:
        raise NormLabError(f"{folder} holds an export already; add --overwrite to replace it, or choose another folder")


def _is_export(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_bytes()).get("model_type") == "normlab"
    except (OSError, ValueError, AttributeError):
        return False
