"""What every model here is: an embedding, a stack of blocks under a scheme, and a head, trained by cross-entropy."""

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
from normlab.roles import Role, find_roles
from normlab.schemes.contract.needs import meet_needs
from normlab.stack import Stack, initialise_
from normlab.utils.uninitialized import NaNUntilInitialised

_MANY_BLOCKS = 1000
"""Depth from which even the modules without weights take minutes: memory is looked at first."""
_STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sublayers(config: TransformerConfig) -> tuple[nn.Module, nn.Module]:
    """The attention and the MLP of one block."""
    attention = Attention(config.dim, config.heads, config.kv_heads, config.head_dim, config.bias)
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
        # A single weight that is made to sum to one is one: the router would not learn from the loss.
        renormalise=config.top_k > 1,
    )
    return attention, moe


class Transformer(NaNUntilInitialised, ABC):
    """A model: `model(inputs)` returns logits, `model.loss(inputs, targets)` what to train on.

    It is always laid out on the meta device first and initialised in one pass by role, so that building it there and
    materialising it later (`to_empty`, `init_`) gives the same weights, bit for bit, from the same seed.
    """

    features: Callable[..., torch.Tensor]
    """What the head reads of some inputs, after the exit; what else it takes is each model's to say."""

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
                [sublayers(config) for _ in range(config.depth)],
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
        """What turns inputs into the first states."""

    @abstractmethod
    def _new_head(self) -> Head:
        """What turns features into logits."""

    @abstractmethod
    def example(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the right shape, all zero, to find out what a step takes."""

    @abstractmethod
    def products_outside(self) -> int:
        """Weights outside the stack that a token is multiplied with, on average over a sequence."""

    @property
    def _head_matrix(self) -> torch.Tensor:
        assert self.head.weight is not None
        return self.head.weight

    def forward(self, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        """Logits; `options` are those of `features`."""
        return self.logits(self.features(inputs, **options))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """What the head makes of features."""
        return self.head(features, self._head_matrix)

    def logit_variance(self) -> torch.Tensor:
        """Variance of the logits of unrelated features of unit RMS: width · std² of the head's matrix."""
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
        """What to train on: mean cross-entropy in nats over targets other than −100, with the losses that go with it.

        `z_loss` weighs the mean square of the logits' log-normaliser; experts add their routers' losses. The logits are
        never all there at once: `chunk` rows at a time, as many as do well if that is left out. `options` are those of
        `features`.
        """
        loss = self._cross_entropy(self.features(inputs, **options), targets, z_loss, chunk).loss
        return loss + self.router_loss() if self.config.experts else loss

    def cross_entropy(self, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        """What to report: the mean cross-entropy alone."""
        return self._cross_entropy(self.features(inputs, **options), targets).loss

    def loss_and_accuracy(self, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        """What to report of a model that names one answer: (mean cross-entropy, share of targets that it names)."""
        features = self.features(inputs, **options)
        found = self._cross_entropy(features, targets)
        named = self.logits(features).argmax(-1)
        # A target that does not count is no answer; none at all is no right one.
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

    def router_loss(self) -> torch.Tensor:
        """Weighted load-balancing and z-loss of the last forward pass, averaged over blocks."""
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
        """Initialise every parameter as config and scheme say."""
        options = {"std": self.config.init_std, "zero_outputs": self.config.zero_outputs, "generator": generator}
        initialise_(self, self.stack.bound, self.find_roles(), **options)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for an optimiser, every parameter in exactly one."""
        return self.stack.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        """Re-apply the scheme's constraint; call it after every optimiser step."""
        if self.stack.bound.constrains:
            self.stack.bound.after_step(self.find_roles())

    def _in_stream(self, state: torch.Tensor) -> torch.Tensor:
        """The first state in the number format of the residual stream."""
        return state if self.config.stream == "auto" else state.to(_STREAMS[self.config.stream])
