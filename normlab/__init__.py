"""NormLab: choose, check, train and understand how the layers of a Transformer are normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.lazy import loader

__version__ = "0.1.0"

if TYPE_CHECKING:
    from normlab import geometry, norms, ops, testing
    from normlab.dynamics.simulate import simulate
    from normlab.errors import NormLabError
    from normlab.models import Decoder, DecoderConfig, Encoder, EncoderConfig, VisionConfig, VisionTransformer
    from normlab.schemes.base import Scheme
    from normlab.schemes.registry import names as schemes
    from normlab.schemes.registry import register, scheme
    from normlab.stability.check import check
    from normlab.stability.probe import probe
    from normlab.stack import Stack
    from normlab.train.config import TrainConfig
    from normlab.train.run import load_run

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "NormLabError",
    "Scheme",
    "Stack",
    "TrainConfig",
    "VisionConfig",
    "VisionTransformer",
    "check",
    "geometry",
    "load_run",
    "norms",
    "ops",
    "probe",
    "register",
    "scheme",
    "schemes",
    "simulate",
    "testing",
]

__getattr__ = loader(
    __name__,
    {
        "Decoder": "models",
        "DecoderConfig": "models",
        "Encoder": "models",
        "EncoderConfig": "models",
        "NormLabError": "errors",
        "Scheme": "schemes.base",
        "Stack": "stack",
        "TrainConfig": "train",
        "VisionConfig": "models",
        "VisionTransformer": "models",
        "check": "stability.check",
        "geometry": "",
        "load_run": "train",
        "norms": "",
        "ops": "",
        "probe": "stability.probe",
        "register": "schemes.registry",
        "scheme": "schemes.registry",
        "schemes": "",
        "simulate": "dynamics.simulate",
        "testing": "",
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
