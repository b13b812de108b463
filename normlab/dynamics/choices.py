"""Choices of a simulation by name; free of torch, so that the command line can show them."""

from __future__ import annotations

from typing import Literal, get_args

Observable = Literal[
    "cosine", "variance", "order", "energy", "close", "clusters", "rank", "speed", "fastest", "radius", "smallest",
    "largest",
]  # fmt: skip
OBSERVABLES: tuple[Observable, ...] = get_args(Observable)
ABOUT: dict[Observable, str] = {
    "cosine": "mean cosine of two tokens",
    "variance": "mean ‖θ − θ̄‖²",
    "order": "length of the mean token ‖θ̄‖",
    "energy": "−log mean e^{β⟨θ_j, θ_k⟩} / β",
    "close": "share of pairs with cosine above 0.999",
    "clusters": "clusters of tokens",
    "rank": "effective rank of the tokens",
    "speed": "mean speed ‖θ̇‖",
    "fastest": "largest speed ‖θ̇‖",
    "radius": "mean radius r",
    "smallest": "smallest radius",
    "largest": "largest radius",
}
"""What each observable is, for axes and tables."""

Start = Literal["uniform", "orthonormal", "clustered"]
"""Tokens at time zero: independent on the sphere, pairwise orthogonal, or close together."""
Method = Literal["rk4", "dopri", "network"]
Clock = Literal["plain", "log"]
Kind = Literal["softmax", "unnormalised"]
Matrices = Literal["identity", "gaussian", "kaiming", "orthogonal", "symmetric"]
Dtype = Literal["float32", "float64"]
