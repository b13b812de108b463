"""`check_scheme`: test your own scheme against the rules that all schemes follow.

    from normlab.testing import check_scheme

    def test_my_scheme():
        check_scheme(MyScheme)

The rules are plain functions on small stacks; they need no pytest, GPU or Triton. NormLab's own tests use the same
ones.
"""

from __future__ import annotations

# In the order in which rules are checked and listed.
from normlab.testing import steps, building, training, theory  # noqa: F401  # isort: skip
from normlab.testing.check import check_scheme
from normlab.testing.rules import RULES, Rule

__all__ = ["RULES", "Rule", "check_scheme"]
