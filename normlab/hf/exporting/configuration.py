"""NormLabConfig: a decoder's configuration as a transformers config (`config.json`, model type `normlab`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from normlab.models.config import DecoderConfig
from normlab.schemes.catalog.reference import refuse_unknown
from normlab.utils.records import from_plain


class NormLabConfig(PreTrainedConfig):
    """`NormLabConfig(model=DecoderConfig(scheme="geonorm", ...))`; every value is written to `config.json`.

    The names that transformers uses for sizes (`hidden_size`, `num_hidden_layers`, ...) are read from `model`.
    """

    model_type = "normlab"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  # the library's name and type

    def __init__(
        self,
        model: DecoderConfig | Mapping[str, Any] | None = None,
        base_dim: int | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        # All fields, not only those given: a file must not change its meaning with our defaults.
        checked = _checked(model or {})
        # A scheme in a user's file is identified by its content: its local folder means nothing elsewhere.
        self.model: dict[str, Any] = checked.to_dict() | {"scheme": checked.scheme_object.shared_text}
        self.base_dim = base_dim
        """Base width of muP, at which the learning rate was tuned; it scales the logits of a tied head."""
        self.use_cache = use_cache
        super().__init__(**kwargs)

    @property
    def decoder_config(self) -> DecoderConfig:
        """The configuration that `normlab.Decoder` is built from."""
        return _checked(self.model)

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.model = {**self.model, "vocab_size": size}

    @property
    def hidden_size(self) -> int:
        return self.model["dim"]

    @property
    def num_hidden_layers(self) -> int:
        return self.model["depth"]

    @property
    def num_attention_heads(self) -> int:
        return self.model["heads"]

    @property
    def num_key_value_heads(self) -> int:
        return self.model["kv_heads"] or self.model["heads"]

    @property
    def head_dim(self) -> int:
        return self.decoder_config.width_of_head

    @property
    def intermediate_size(self) -> int:
        return self.decoder_config.width_of_mlp

    @property
    def max_position_embeddings(self) -> int:
        return self.model["max_length"]

    @property
    def tie_word_embeddings(self) -> bool:
        return self.decoder_config.tied_head


def _checked(model: DecoderConfig | Mapping[str, Any]) -> DecoderConfig:
    if isinstance(model, DecoderConfig):
        return model
    refuse_unknown(str(model.get("scheme", "")))
    return from_plain(DecoderConfig, model, "model")


AutoConfig.register(NormLabConfig.model_type, NormLabConfig, exist_ok=True)
