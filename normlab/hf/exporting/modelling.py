"""NormLabForCausalLM: NormLab's decoder as a transformers causal language model.

The computation is that of `normlab.Decoder`; this class adds transformers' outputs, caches, masks, attention backends,
loading and generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from normlab.errors import NormLabError
from normlab.hf.exporting.bridge import AttentionBackend, LayerCache
from normlab.hf.exporting.configuration import NormLabConfig
from normlab.hf.exporting.weights import init_missing_, mark_initialised, resize_vocabulary_
from normlab.models.decoder import Decoder
from normlab.stack import Layer
from normlab.targets.hub import refuse_missing
from normlab.train.optimiser import parameter_groups
from normlab.train.transfer import Transfer


class NormLabForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder under any scheme: `NormLabForCausalLM(NormLabConfig(model={"scheme": "geonorm"}))`."""

    config: NormLabConfig
    config_class = NormLabConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _no_split_modules = [Layer.__name__]  # noqa: RUF012  # the library's name and type
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: NormLabConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config)
        if self._transfer is not None:
            is_meta = self.decoder.embedding.weight.is_meta
            self._transfer.attach_(self.decoder) if is_meta else self._transfer.init_(self.decoder)
        mark_initialised(self.decoder)
        self.gradient_checkpointing = self.decoder.stack.checkpointing
        self.post_init()

    @classmethod
    def from_decoder(cls, decoder: Decoder, **options: Any) -> NormLabForCausalLM:
        """Wrap a decoder without copying it; options are those of `NormLabConfig`."""
        with torch.device("meta"):
            model = cls(NormLabConfig(model=decoder.config, **options))
        model.decoder = decoder
        mark_initialised(decoder)
        return model.train(decoder.training)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """transformers' `from_pretrained`; weights that the files lack are an error, since it draws them at random.

        With `output_loading_info=True` the lists of them are returned, as by transformers, for the caller to judge.
        """
        # The type annotations of transformers know the model alone.
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **options)
        found, report = loaded
        if output_loading_info:
            return found, report
        refuse_missing(str(name), report["missing_keys"], report["unexpected_keys"])
        return found

    # -- the forward pass ----------------------------------------------------------------------------------------

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the loss if `labels` are given: token ids, not shifted, −100 for positions to ignore.

        Other keyword arguments are passed to the attention backend and to the loss, as in transformers' models.
        """
        config = self.config
        embedded = self._embed(input_ids, inputs_embeds)
        cache = self._find_cache(past_key_values, config.use_cache if use_cache is None else use_cache)
        keep = bool(config.output_attentions if output_attentions is None else output_attentions)
        backends = [AttentionBackend(config, k, self.training, keep, kwargs) for k in range(config.num_hidden_layers)]
        states = [] if (config.output_hidden_states if output_hidden_states is None else output_hidden_states) else None
        hidden = self._features(embedded, attention_mask, position_ids, cache, backends, states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.head(hidden[:, kept], self.decoder.embedding.weight)
        found: dict[str, Any] = {
            "loss": None if labels is None else self._loss(logits, labels, kwargs),
            "logits": logits,
            "past_key_values": cache,
            "hidden_states": None if states is None else self._hidden_states(states, hidden),
            "attentions": tuple(backend.kept() for backend in backends) if keep else None,
        }
        return CausalLMOutputWithPast(**found)

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise NormLabError("expected input_ids or inputs_embeds, one of them; got both or neither")
        self._check_weights(input_ids if inputs_embeds is None else inputs_embeds)
        return self.decoder.embedding(input_ids) if inputs_embeds is None else inputs_embeds

    def _check_weights(self, given: torch.Tensor | None) -> None:
        # Offloaded weights are loaded only during the call of the module that owns them; tied heads and steps read
        # weights of other modules and would compute with uninitialised memory.
        compiling = torch.compiler.is_compiling()
        if not compiling and not (given is None or given.is_meta) and any(p.is_meta for p in self.parameters()):
            raise NormLabError(
                "weights are offloaded or not loaded (meta device); expected them in memory; load the "
                "model without an offload folder, on one device or over several GPUs"
            )

    def _find_cache(self, given: Cache | None, wanted: bool) -> Cache | None:
        if not (self.decoder.stack.checkpointing and torch.is_grad_enabled()):
            return DynamicCache(config=self.config) if wanted and given is None else given
        # A recomputed layer would append its keys again.
        if given is not None:
            raise NormLabError("a cache and gradient checkpointing exclude each other; leave out past_key_values")
        return None

    def _features(
        self,
        embedded: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Cache | None,
        backends: Sequence[AttentionBackend],
        states: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(embedded.shape[1], device=embedded.device) + seen).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        stores = [None if cache is None else LayerCache(cache, k) for k in range(len(backends))]
        per_block = [{"mixer": mixer, "cache": store} for mixer, store in zip(backends, stores, strict=True)]
        return self.decoder.transform(embedded, position_ids, mask=mask, per_block=per_block, states=states)

    def _hidden_states(self, states: Sequence[torch.Tensor], last: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Hidden states before the first and after every layer; the last one after the final norm, as usual."""
        return (*(self.decoder.stack.hidden(state) for state in states[:-1]), last)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return loss + self.decoder.router_loss() if self.decoder.config.experts else loss

    # -- the scheme's rules --------------------------------------------------------------------------------------

    def init_(self) -> NormLabForCausalLM:
        """Initialise every parameter by configuration and scheme."""
        self.decoder.init_()
        if self._transfer is not None:
            self._transfer.init_(self.decoder)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; every parameter is in exactly one."""
        if self._transfer is None:
            return self.decoder.param_groups(lr=lr, weight_decay=weight_decay)
        return parameter_groups(self.decoder, lr=lr, weight_decay=weight_decay, transfer=self._transfer)

    def after_step(self) -> None:
        """Re-apply the scheme's constraint; call it after every optimiser step."""
        self.decoder.after_step()

    @property
    def _transfer(self) -> Transfer | None:
        base = self.config.base_dim
        return None if base is None else Transfer(base, self.config.hidden_size)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`; early exit raises, since a scheme's exit belongs to the last layer."""
        config = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("assistant_early_exit", getattr(config, "assistant_early_exit", None)) is not None:
            raise NormLabError(
                "a NormLab model has no early exit: its head reads the last layer alone; leave out "
                "assistant_early_exit, or pass a smaller model as assistant_model"
            )
        # The type annotations of transformers do not match their own call.
        return super().generate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # -- what the library calls ----------------------------------------------------------------------------------

    def _init_weights(self, module: nn.Module) -> None:
        init_missing_(self.decoder, module)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        if every_n_layers != 1:
            raise NormLabError("gradient checkpointing takes all layers or none; leave out every_n_layers")
        reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
        if enable and reentrant and self.decoder.config.experts:
            raise NormLabError("experts' routers would lose the gradient of their losses; use use_reentrant=False")
        if enable and reentrant and self.decoder.config.value_residual != "none":
            raise NormLabError("the first block's values would lose their gradient; use use_reentrant=False")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        self.decoder.stack.checkpointing = enable
        if enable:
            self.decoder.stack.checkpoint_with = gradient_checkpointing_func

    def get_input_embeddings(self) -> nn.Embedding:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        """The module whose `weight` gives the logits: the embedding if the head is tied."""
        return self.decoder.embedding if self.decoder.head.weight is None else self.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.get_output_embeddings().weight = new_embeddings.weight

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the vocabulary: rows of the embedding, of an untied head, and of logit scales."""
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        multiple = pad_to_multiple_of or 1
        size = multiple * -(-size // multiple)
        if size != self.config.vocab_size:
            resize_vocabulary_(self.decoder, size, mean=mean_resizing)
            self.config.vocab_size = size
        return self.get_input_embeddings()


AutoModelForCausalLM.register(NormLabConfig, NormLabForCausalLM, exist_ok=True)
