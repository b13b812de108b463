"""Schemes in one batch: as each of them alone, whatever they read, however they switch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normlab.dynamics.config import OBSERVABLES, SimulateConfig
from normlab.dynamics.recording import record_law, record_laws
from normlab.dynamics.system import laws, small_systems
from normlab.dynamics.system.equiangular import Equiangular
from normlab.schemes.contract.law import Motion
from tests.matrix import parametrize

CONFIG = SimulateConfig(tokens=7, dim=4, beta=(0.5, 3.0), seeds=2, time=2.0, looks=4, step=0.1, dtype="float64")


def test_laws_that_change_alike_share_a_batch():
    found = [laws.find_law(name, 8) for name in ("post", "none", "peri", "mix", "output", "keel", "pre")]
    assert small_systems.batch_groups(CONFIG, found) == [[0, 2, 6], [1, 4], [3], [5]]
    assert small_systems.batch_groups(CONFIG.replace(method="network"), found) == [[place] for place in range(7)]
    # 1024 tokens leave no room for a second scheme.
    assert small_systems.batch_groups(CONFIG.replace(tokens=1024), found) == [[0], [2], [6], [1], [4], [3], [5]]


def test_each_law_sees_its_own_systems():
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(5, 6, 3, generator=draw, dtype=torch.float64)
    motion = Motion(*numbers)
    found = [laws.find_law(name, 8) for name in ("pre", "peri", "lns")]
    joined = small_systems.join_laws(found)
    for place, law in enumerate(found):
        part, rows = Motion(*numbers[:, 2 * place : 2 * place + 2]), slice(2 * place, 2 * place + 2)
        assert torch.equal(joined.speed(motion)[rows], law.speed(part))
        assert torch.equal(joined.radial(motion)[rows], law.radial(part))
        assert torch.equal(joined.temperature(motion.time[:, 0])[rows], law.temperature(part.time[:, 0]))
    assert small_systems.join_laws(found[:1]) is found[0]


OPTIONS = [{}, {"method": "dopri"}, {"weights": "gaussian", "redraw": True, "mlp": 5}, {"method": "network"}]


@parametrize("options", OPTIONS, quick=OPTIONS[1:3], ids=str)
def test_company_changes_nothing(options):
    """Only products of another shape round anew."""
    specs = ["post", "none", "peri", "mix", "hybrid", "keel"]
    config = CONFIG.replace(**options)
    for spec, found in zip(specs, record_laws(config, specs), strict=True):
        alone = record_law(config, spec)
        for name in OBSERVABLES:
            assert found.values[name] == pytest.approx(alone.values[name], abs=1e-10), (spec, name)
        assert found.histogram == pytest.approx(alone.histogram, abs=1e-12)
        assert found.paths == pytest.approx(alone.paths, abs=1e-6)


def test_the_symmetric_case_of_several_laws():
    found = [laws.find_law(name, 8) for name in ("post", "peri", "sqrt")]
    times = torch.linspace(0.0, 5.0, 6, dtype=torch.float64)
    several = Equiangular(small_systems.join_laws(found), 9, torch.full((3,), 2.0, dtype=torch.float64)).orbit(times)
    for place, law in enumerate(found):
        alone = Equiangular(law, 9, 2.0).orbit(times)
        assert several[..., place].numpy() == pytest.approx(alone.numpy(), abs=1e-9)


def test_progress_runs_from_nothing_to_all():
    told: list[tuple[str, float]] = []
    record_laws(CONFIG, ["post", "none", "peri"], tell=lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert np.isclose(shares[0], 2 / 15)
    assert dict.fromkeys(what for what, _ in told) == dict.fromkeys(["post, peri", "none"])
