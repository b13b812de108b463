"""Our operators, made known to the compiler before it meets them.

When torch 2.11's inductor first meets an operator that it does not know, it spells out the whole expression of its
arguments for a log line, whether anybody reads it or not. Every step of a stack names the step before it twice, so at
the end of twelve blocks that line takes for ever. Operators that it knows are spared; torch 2.13 is, too.
"""

from __future__ import annotations

import torch


def cache_autograd_functions() -> None:
    """Let the next process take what this one compiles. The compiler keeps its results anyhow, but for graphs with
    an `autograd.Function`, which it holds back until its makers have tried that on more models (pytorch#149751).
    """
    import torch._functorch.config as config

    name = "autograd_cache_allow_custom_autograd_functions"
    if hasattr(config, name):
        setattr(config, name, True)


def register_fallbacks() -> None:
    """Call this where an operator of ours may be traced; outside a compilation it costs nothing."""
    if torch.compiler.is_compiling():
        _register_fallbacks()


def _register_fallbacks() -> bool:
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for op in _operators():
        if op not in lowerings:
            # The constraint that it would be given otherwise.
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            make_fallback(op, layout_constraint=constraint, warn=False)
    return True


# Dynamo runs such a function while it traces, and forgets it. This is all that `torch.compiler.assume_constant_result`
# does, but that imports the compiler, which takes as long as torch itself.
_register_fallbacks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _operators() -> list[torch._ops.OpOverload]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("normlab::")]
    return [getattr(torch.ops.normlab, name.removeprefix("normlab::")).default for name in names]
