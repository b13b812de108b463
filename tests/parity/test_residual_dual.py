"""x-transformers 1.44.8: ResiDual, which later versions dropped. The old version cannot be installed next to the new
one, so it lies in a folder of its own and the comparison runs in a process that sees that folder first.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from .compare import WRONG, check, tolerance

REPOSITORY = Path(__file__).parents[2]
OLD = Path(os.environ.get("NORMLAB_OLD_X_TRANSFORMERS") or Path(sys.prefix) / "x-transformers-1.44.8")


# A process that imports another version of the library.
pytestmark = pytest.mark.full


@cache
def found() -> dict:
    if not (OLD / "x_transformers").is_dir():
        pytest.fail(f"x-transformers 1.44.8 is not in {OLD}; `make test` installs it there", pytrace=False)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(OLD.resolve()), str(REPOSITORY)])}
    command = [sys.executable, "-W", "error", "-m", "tests.parity.residual_dual"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_value_and_gradients_match():
    assert found()["version"] == "1.44.8"
    check(found()["same"], tolerance())


def test_other_options_are_told_apart():
    assert found()["wrong weight"]["output"] > WRONG
    assert found()["wrong weight"]["gradient of input"] > WRONG
    assert found()["wrong scale"]["second stream"] > WRONG
