"""NormLab: residual-normalisation schemes for Transformers, with tools to train, compare, check and simulate them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

__version__ = "0.2.0"

if TYPE_CHECKING:
    from normlab import geometry, norms, ops, schemes, testing
    from normlab.checks.check import check
    from normlab.checks.coordinates.axes import check_coordinates
    from normlab.dynamics.simulate import simulate
    from normlab.errors import NormLabError
    from normlab.ladders.ladder import ladder
    from normlab.models import Decoder, DecoderConfig, Encoder, EncoderConfig, VisionConfig, VisionTransformer
    from normlab.probes.probe import probe
    from normlab.schemes.catalog.registry import list_schemes, register, scheme
    from normlab.schemes.contract.scheme import Scheme
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
    "check_coordinates",
    "geometry",
    "ladder",
    "list_schemes",
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
        "Scheme": "schemes.contract.scheme",
        "Stack": "stack",
        "TrainConfig": "train",
        "VisionConfig": "models",
        "VisionTransformer": "models",
        "check": "checks.check",
        "check_coordinates": "checks.coordinates.axes",
        "geometry": "",
        "ladder": "ladders.ladder",
        "list_schemes": "schemes.catalog.registry",
        "load_run": "train",
        "norms": "",
        "ops": "",
        "probe": "probes.probe",
        "register": "schemes.catalog.registry",
        "scheme": "schemes.catalog.registry",
        "schemes": "",
        "simulate": "dynamics.simulate",
        "testing": "",
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
