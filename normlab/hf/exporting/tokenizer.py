"""A run's tokenizer as the library's: the same numbers for the same text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from normlab.data.tokenizer import Tokenizer
from normlab.utils.lazy import import_optional


def library_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """One that begins every text with the end of another, as the model has seen it in training."""
    inner = tokenizer.as_package()
    end = inner.id_to_token(tokenizer.end)
    inner.post_processor = _begins_with(end, tokenizer.end)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        # A text that spells the end out does not end there; training read it so, too.
        split_special_tokens=True,
    )


def _begins_with(word: str, number: int) -> Any:
    processors = import_optional("tokenizers", "hf", "normlab export").processors
    return processors.TemplateProcessing(
        single=[word, "$A"], pair=[word, "$A:0", "$B:1"], special_tokens=[(word, number)]
    )
