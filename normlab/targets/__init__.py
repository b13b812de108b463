"""Targets: everything that can be checked, behind one interface.

target = resolve("peri(step=0.1)")                       # a scheme, a Hugging Face id or config.json, module:factory,
model = target.build(depth=24, seed=0)                   # a live module, a run folder
loss = target.loss(model, next(target.batches(seed=0)))
"""

from normlab.targets.resolve import resolve
from normlab.targets.target import Target

__all__ = ["Target", "resolve"]
