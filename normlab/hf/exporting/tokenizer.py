"""Convert a run's tokenizer to a transformers tokenizer with the same token ids."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from normlab.data.tokenizer import Tokenizer
from normlab.utils.lazy import import_optional


def to_fast_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer that starts every text with the end-of-text token, as in training."""
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
        # A text that contains the end-of-text string does not end there, as in training.
        split_special_tokens=True,
    )


def _begins_with(word: str, number: int) -> Any:
    processors = import_optional("tokenizers", "hf", "normlab export").processors
    return processors.TemplateProcessing(
        single=[word, "$A"], pair=[word, "$A:0", "$B:1"], special_tokens=[(word, number)]
    )
