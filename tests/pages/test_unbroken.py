"""Numbers that stay on one line of a page."""

from __future__ import annotations

import pytest

from normlab.pages.page import unbroken

pytest.importorskip("markupsafe")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5e-4 to 1.25e-3", '<span class="whole">5e-4</span> to <span class="whole">1.25e-3</span>'),
        ("a <b> & 2e-05", 'a &lt;b&gt; &amp; <span class="whole">2e-05</span>'),
        ("pre-norm, the-4, 1e5, 2026-11-18, f1e-3", "pre-norm, the-4, 1e5, 2026-11-18, f1e-3"),
    ],
)
def test_exponents_are_not_broken_at_their_hyphens(text: str, expected: str) -> None:
    assert unbroken(text) == expected
