"""Rotary embedding: a rotation, which sees only differences of positions, in Llama's layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from normlab.errors import NormLabError
from normlab.models.rotary import rotary_table, rotate

EPS64 = torch.finfo(torch.float64).eps
EPS32 = torch.finfo(torch.float32).eps


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def angle_by_angle(x: torch.Tensor, positions: list[int], theta: float) -> torch.Tensor:
    """The definition, as complex numbers: channel i is the real and channel i + half the imaginary part."""
    half = x.shape[-1] // 2
    result = x.clone()
    for t, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(position * theta ** (-2 * i / (2 * half)), dtype=torch.float64)
            turned = torch.complex(x[:, t, :, i], x[:, t, :, half + i]) * torch.polar(torch.ones_like(angle), angle)
            result[:, t, :, i], result[:, t, :, half + i] = turned.real, turned.imag
    return result


def test_matches_the_definition():
    x, positions = random(2, 4, 3, 6), [0, 1, 7, 300]
    turned = rotate(x, rotary_table(torch.tensor(positions), 6, 100.0, dtype=torch.float64))
    # The angle itself is rounded once or twice: an error of 300 · 2 eps at the last position, times |x| < 5.
    torch.testing.assert_close(turned, angle_by_angle(x, positions, 100.0), rtol=0, atol=3000 * EPS64)


@given(position=st.integers(0, 10**6), half=st.integers(1, 40))
@settings(max_examples=30, deadline=None, database=None)
def test_is_orthogonal_at_any_position(position: int, half: int):
    identity = torch.eye(2 * half, dtype=torch.float64).unsqueeze(1)[None]
    table = rotary_table(torch.tensor([position]), 2 * half, 10_000.0, dtype=torch.float64)
    matrix = rotate(identity.transpose(1, 2), table).squeeze()
    # Entries are exact up to the rounding of sin and cos, and two products are added: cos² + sin² = 1 ± 4 eps.
    assert (matrix @ matrix.T - torch.eye(2 * half)).abs().max() <= 4 * EPS64


@given(q_at=st.integers(0, 2000), k_at=st.integers(0, 2000), shift=st.integers(0, 100_000))
@settings(max_examples=30, deadline=None, database=None)
def test_scores_depend_on_the_difference_of_positions(q_at: int, k_at: int, shift: int):
    q, k = random(2, 1, 1, 1, 16)

    def score(*at: int) -> torch.Tensor:
        tables = [rotary_table(torch.tensor([position]), 16, 10_000.0, dtype=torch.float64) for position in at]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    # Angles up to 102,000 are rounded to 102,000 eps each; four of them enter, times |q||k| <= 40.
    tolerance = 4 * 102_000 * EPS64 * 40
    assert abs(score(q_at, k_at) - score(q_at + shift, k_at + shift)) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_the_identity_at_position_zero_and_keeps_the_dtype(dtype: torch.dtype):
    x = random(2, 3, 4, 8).to(dtype)
    turned = rotate(x, rotary_table(torch.zeros(3, dtype=torch.long), 8, 10_000.0))
    assert turned.dtype == dtype
    assert torch.equal(turned, x)


def test_matches_transformers():
    x, positions = random(2, 9, 3, 8, dtype=torch.float32), torch.arange(9)
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, 8, 2).float() / 8))
    angles = torch.cat([torch.outer(positions.float(), frequencies)] * 2, dim=-1)[None]
    theirs, _ = apply_rotary_pos_emb(x, x, angles.cos(), angles.sin(), unsqueeze_dim=2)
    # Their angle is a rounded product of a rounded frequency: 2 eps of at most 8, plus four roundings; |x| < 5.
    torch.testing.assert_close(
        rotate(x, rotary_table(positions, 8, 10_000.0)), theirs, rtol=0, atol=5 * (2 * 8 + 4) * EPS32
    )


def test_positions_may_differ_within_a_batch():
    x = random(2, 3, 2, 4)
    positions = torch.tensor([[0, 1, 2], [5, 0, 1]])
    turned = rotate(x, rotary_table(positions, 4, 100.0, dtype=torch.float64))
    for row in range(2):
        alone = rotate(x[row : row + 1], rotary_table(positions[row], 4, 100.0, dtype=torch.float64))
        assert torch.equal(turned[row : row + 1], alone)


def test_fp32_table_is_right_far_out():
    far = torch.tensor([123_457])
    for rough, exact in zip(rotary_table(far, 8, 1e4), rotary_table(far, 8, 1e4, dtype=torch.float64), strict=True):
        # One rounding of a number below 1; angles in fp32 would be wrong by 0.004.
        assert (rough - exact).abs().max() <= EPS32 / 2


def test_shapes_on_the_meta_device():
    cos, sin = rotary_table(torch.empty(2, 5, dtype=torch.long, device="meta"), 8, 1e4)
    assert cos.shape == sin.shape == (2, 5, 1, 8)


@pytest.mark.parametrize(("head_dim", "theta"), [(7, 1e4), (0, 1e4), (8, 0.0), (8, -1.0), (8, float("nan"))])
def test_refuses_what_cannot_be_rotated(head_dim: int, theta: float):
    with pytest.raises(NormLabError, match="expected"):
        rotary_table(torch.arange(3), head_dim, theta)


def test_the_table_is_opaque_to_a_compiler():
    # Seen through, its fp64 cosines would be computed for every element of every query and key of every block.
    from torch._dynamo.testing import EagerAndRecordGraphs

    positions = torch.arange(5)
    torch.library.opcheck(torch.ops.normlab.rotary_table.default, (positions, 8, 10_000.0, torch.float32))
    torch._dynamo.reset()
    seen = EagerAndRecordGraphs()
    x = torch.randn(1, 5, 2, 8)

    @torch.compile(backend=seen, fullgraph=True)
    def run(x):
        table = rotary_table(torch.arange(5), 8)
        return rotate(x, table) + rotate(2 * x, table)

    expected = rotate(x, rotary_table(positions, 8)) + rotate(2 * x, rotary_table(positions, 8))
    assert torch.equal(run(x), expected)
    names = [str(node.target) for node in seen.graphs[0].graph.nodes]
    assert sum("rotary_table" in name for name in names) == 1
    assert not any("cos" in name for name in names)
