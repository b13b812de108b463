"""NormLab in the Hugging Face stack. Importing it makes NormLab's models known to the library's Auto classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.data.optional import need
from normlab.lazy import loader

need("transformers", "hf", "normlab.hf")

# At once, not on first use: the Auto classes must know them.
from normlab.hf.configuration import NormLabConfig  # noqa: E402
from normlab.hf.modelling import NormLabForCausalLM  # noqa: E402

if TYPE_CHECKING:
    from normlab.hf.exporting import export
    from normlab.hf.trainer import NormLabCallback, optimizer_cls_and_kwargs

__all__ = [
    # NormLab's models as the library's
    "NormLabCallback",
    "NormLabConfig",
    "NormLabForCausalLM",
    "export",
    "optimizer_cls_and_kwargs",
]

__getattr__ = loader(
    __name__,
    {
        # NormLab's models as the library's
        "NormLabCallback": "trainer",
        "export": "exporting",
        "optimizer_cls_and_kwargs": "trainer",
    },
)
