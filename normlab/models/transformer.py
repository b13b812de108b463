"""`Transformer`: base class of all models: embedding, stack of blocks under a scheme, head, and cross-entropy loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.attention import Attention
from normlab.models.config import TransformerConfig
from normlab.models.cross_entropy import Loss, chunked_cross_entropy
from normlab.models.head import Head
from normlab.models.mlp import MLP
from normlab.models.moe import MoE
from normlab.models.value_residual import FirstValues, ValueMix
from normlab.roles import Role, find_roles
from normlab.schemes.contract.needs import meet_needs
from normlab.stack import Stack, initialise_
from normlab.utils.uninitialized import NaNUntilInitialised

_MANY_BLOCKS = 1000
"""Depth from which memory is checked before the modules are created, which takes minutes even without weights."""
_STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sublayers(config: TransformerConfig, block: int = 0) -> tuple[nn.Module, nn.Module]:
    """The attention and the MLP of one block."""
    attention = Attention(config.dim, config.heads, config.kv_heads, config.head_dim, config.bias)
    if config.value_residual != "none" and block > 0:
        attention.value_mix = ValueMix(learned=config.value_residual == "learned")
    if not config.experts:
        return attention, MLP(config.dim, config.width_of_mlp, config.mlp, config.bias)
    if config.bias:
        raise NormLabError("experts have no biases; leave bias off, or experts at 0")
    moe = MoE(
        config.dim,
        config.width_of_mlp,
        config.experts,
        config.top_k,
        config.mlp,
        shared_hidden=config.shared_hidden,
        # With top_k = 1 a renormalised weight is always 1, and the router would get no gradient from the loss.
        renormalise=config.top_k > 1,
    )
    return attention, moe


class Transformer(NaNUntilInitialised, ABC):
    """Base class of the models: `model(inputs)` returns logits, `model.loss(inputs, targets)` the training loss.

    A model is always built on the meta device first and then initialised by role in one pass. Building it on the meta
    device and materialising it later (`to_empty`, `init_`) therefore gives bitwise the same weights from the same seed.
    """

    features: Callable[..., torch.Tensor]
    """Computes the head's input from the model's inputs; its options depend on the model."""

    def __init__(self, config: TransformerConfig, *, device: torch.device | str | None = None):
        super().__init__()
        self.config = config
        target = torch.device(device) if device is not None else torch.get_default_device()
        if config.depth > _MANY_BLOCKS:
            from normlab.models.memory_check import check_memory_to_build

            check_memory_to_build(config, target)
        with torch.device("meta"):
            self.embedding = self._new_embedding()
            self.stack = Stack(
                config.scheme,
                [sublayers(config, k) for k in range(config.depth)],
                config.dim,
                topology=config.topology,
                checkpointing=config.checkpointing,
                kernels=config.kernels,
            )
            self.head = self._new_head()
            scheme = self.stack.scheme
            meet_needs([need for need in scheme.needs if need.in_head], [self.head], who=scheme.name)
        if target.type != "meta":
            self.to_empty(device=target)
            self.init_()

    @abstractmethod
    def _new_embedding(self) -> nn.Module:
        """A new module that embeds the inputs."""

    @abstractmethod
    def _new_head(self) -> Head:
        """A new output head."""

    @abstractmethod
    def example(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of the right shape, all zero, for estimates of memory."""

    @abstractmethod
    def products_outside(self) -> int:
        """Weights outside the stack that are multiplied per token, on average over a sequence (for FLOP counts)."""

    @property
    def _head_matrix(self) -> torch.Tensor:
        assert self.head.weight is not None
        return self.head.weight

    def forward(self, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        """Logits; `options` are those of `features`."""
        return self.logits(self.features(inputs, **options))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Apply the head to features."""
        return self.head(features, self._head_matrix)

    def logit_variance(self) -> torch.Tensor:
        """Variance of the logits for random features of unit RMS: width · std² of the head's weight."""
        return torch.linalg.vector_norm(self._head_matrix.detach().float()).square() / self.config.answers

    def loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        z_loss: float = 0.0,
        chunk: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """The training loss: mean cross-entropy in nats over targets other than −100, plus auxiliary losses.

        `z_loss` is the weight of the mean squared log-normaliser of the logits; a mixture of experts adds its router
        losses. Logits are computed `chunk` rows at a time (chosen automatically if left out), never all at once.
        `options` are those of `features`.
        """
        loss = self._cross_entropy(self.features(inputs, **options), targets, z_loss, chunk).loss
        return loss + self.router_loss() if self.config.experts else loss

    def cross_entropy(self, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        """The mean cross-entropy without auxiliary losses, for reports."""
        return self._cross_entropy(self.features(inputs, **options), targets).loss

    def loss_and_accuracy(self, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        """(mean cross-entropy, accuracy), for reports."""
        features = self.features(inputs, **options)
        found = self._cross_entropy(features, targets)
        named = self.logits(features).argmax(-1)
        # Ignored targets never equal a prediction; without any target the accuracy is 0.
        return torch.stack([found.loss, (named == targets).sum() / found.count.clamp(min=1)])

    def _cross_entropy(
        self, features: torch.Tensor, targets: torch.Tensor, z_loss: float = 0.0, chunk: int | None = None
    ) -> Loss:
        return chunked_cross_entropy(
            features.flatten(0, -2),
            self._head_matrix,
            targets.flatten(),
            logit_transform=self.head.logit_scale,
            z_loss=z_loss,
            chunk=chunk,
            kernels=self.config.kernels,
        )

    def compile_parts(self, **options: Any) -> Self:
        """Compile one layer for all, and the head with its loss, in place; `options` are those of torch.compile.

        Compiling `loss` as a whole takes time in proportion to the depth. This takes as long as a model of two blocks,
        and costs some time of the host at every block, unless the step is recorded as a CUDA graph. A copy of the model
        is not compiled.
        """
        self.stack.compile_layers(**options)
        self._cross_entropy = torch.compile(self._cross_entropy, **options)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # The compiled loss has this model's head: a copy must have its own. Copies are not compiled, as torch has it.
        return {name: value for name, value in super().__getstate__().items() if name != "_cross_entropy"}

    def router_loss(self) -> torch.Tensor:
        """Weighted load-balancing loss and z-loss of the routers in the last forward pass, averaged over blocks."""
        found = [module.routing for module in self.modules() if isinstance(module, MoE)]
        routings = [routing for routing in found if routing is not None]
        if not routings:
            raise NormLabError("no routing to speak of: expected a model with experts, after a forward pass")
        balance = torch.stack([routing.balance_loss for routing in routings]).mean()
        z = torch.stack([routing.z_loss for routing in routings]).mean()
        return self.config.balance_weight * balance + self.config.router_z_weight * z

    def find_roles(self) -> list[Role]:
        """The role of every parameter."""
        return find_roles(self)

    def init_(self, *, generator: torch.Generator | None = None) -> Self:
        """Initialise all parameters by the rules of configuration and scheme."""
        options = {"std": self.config.init_std, "zero_outputs": self.config.zero_outputs, "generator": generator}
        initialise_(self, self.stack.bound, self.find_roles(), **options)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; every parameter is in exactly one."""
        return self.stack.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        """Apply the scheme's constraint to the parameters; call it after every optimiser step."""
        if self.stack.bound.constrains:
            self.stack.bound.after_step(self.find_roles())

    def _to_attention(self) -> dict[str, Any]:
        """Arguments of every attention in one forward pass that follow from the configuration."""
        return {} if self.config.value_residual == "none" else {"first_values": FirstValues()}

    def _in_stream(self, state: torch.Tensor) -> torch.Tensor:
        """Cast the first state to the dtype of the residual stream."""
        return state if self.config.stream == "auto" else state.to(_STREAMS[self.config.stream])
