"""Registration of NormLab's custom operators with torch.compile.

When torch 2.11's inductor first meets an unknown operator, it formats the whole expression of its arguments for a log
message, even if nothing is logged. Every step of a stack refers to the step before it twice, so after twelve blocks
that text takes forever. Registered operators are exempt, and torch 2.13 no longer does this.
"""

# Only torch's private modules list operators and register fallbacks.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import torch


def cache_autograd_functions() -> None:
    """Let torch.compile cache graphs that contain an `autograd.Function` on disk, for the next process.

    Other graphs are cached anyway; these are excluded by default (pytorch#149751).
    """
    import torch._functorch.config as config

    name = "autograd_cache_allow_custom_autograd_functions"
    if hasattr(config, name):
        setattr(config, name, True)


def register_fallbacks() -> None:
    """Register NormLab's operators with inductor. Call it before they may be traced; free outside a compilation."""
    if torch.compiler.is_compiling():
        _register_fallbacks()


def _register_fallbacks() -> bool:
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for op in _operators():
        if op not in lowerings:
            # The layout constraint that inductor would use by default.
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            make_fallback(op, layout_constraint=constraint, warn=False)
    return True


# Dynamo calls such a function during tracing and leaves it out of the graph. `torch.compiler.assume_constant_result`
# does only this, but it imports the compiler, which takes as long as importing torch.
_register_fallbacks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _operators() -> list[torch._ops.OpOverload]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("normlab::")]
    return [getattr(torch.ops.normlab, name.removeprefix("normlab::")).default for name in names]
