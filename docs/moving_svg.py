"""Animated SVG pictures: points that move and curves that are drawn, in panels side by side; no script, no library.

Everything plays twice when the picture is opened and then stands still at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

PANEL, HEIGHT, SECONDS = 190, 250, 8
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333; } .name { font-weight: 600; font-size: 14px; }
.axis { stroke: #bbb; fill: none; } .token { fill: #3949ab; fill-opacity: .75; } .bar { fill: #e0674c; }
.first { stroke: #3949ab; } .second { stroke: #e0674c; } .curve { fill: none; stroke-width: 1.8; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } .token { fill: #9fa8da; } .first { stroke: #9fa8da; } }
"""


def picture(title: str, panels: Sequence[str]) -> str:
    """The panels in a row, with a title for readers who cannot see them."""
    width = PANEL * len(panels)
    placed = "".join(f'<g transform="translate({PANEL * k} 0)">{panel}</g>' for k, panel in enumerate(panels))
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img">'
    return f"{frame}<title>{escape(title)}</title><style>{_STYLE}</style>{placed}</svg>\n"


def moving(attribute: str, values: Iterable[float]) -> str:
    """One attribute that takes these values in turn, at even distances in time."""
    steps = ";".join(f"{value:.4g}" for value in values)
    return f'<animate attributeName="{attribute}" dur="{SECONDS}s" repeatCount="2" fill="freeze" values="{steps}"/>'


def label(text: str, y: float, kind: str = "") -> str:
    return f'<text x="{PANEL / 2}" y="{y}" text-anchor="middle" class="{kind}">{escape(text)}</text>'


def sphere_panel(name: str, paths: Sequence[Sequence[Sequence[float]]], cosines: Sequence[float], note: str) -> str:
    """Tokens on a sphere seen from the front, and a bar for how alike they are. `paths`: time × token × (x, y, z)."""
    x, y, radius = PANEL / 2, 112, 74
    parts = [label(name, 20, "name"), f'<circle cx="{x}" cy="{y}" r="{radius}" class="axis"/>']
    for token in range(len(paths[0])):
        across = [x + radius * frame[token][0] for frame in paths]
        up = [y - radius * frame[token][1] for frame in paths]
        # Tokens behind the sphere are smaller.
        sizes = [3.4 + 1.4 * frame[token][2] for frame in paths]
        inside = moving("cx", across) + moving("cy", up) + moving("r", sizes)
        start = f'cx="{across[-1]:.4g}" cy="{up[-1]:.4g}" r="{sizes[-1]:.3g}"'
        parts.append(f'<circle class="token" {start}>{inside}</circle>')
    length = PANEL - 40
    widths = [max(length * cosine, 0.0) for cosine in cosines]
    parts.append(f'<rect x="20" y="204" width="{length}" height="7" class="axis"/>')
    parts.append(
        f'<rect x="20" y="204" width="{widths[-1]:.4g}" height="7" class="bar">{moving("width", widths)}</rect>'
    )
    return "".join([*parts, label(f"mean cosine {cosines[0]:.2f} → {cosines[-1]:.2f}", 226), label(note, 243)])


def curve_panel(name: str, first: Sequence[float], second: Sequence[float], notes: tuple[str, str]) -> str:
    """Two curves over the blocks, each a share of the panel's height in [0, 1], drawn from left to right."""
    left, top, width, height = 14, 34, PANEL - 28, 150
    clip = f"clip-{name}"
    shown = f'<rect x="{left}" y="{top - 4}" width="{width}" height="{height + 8}">{moving("width", (0, width))}</rect>'
    parts = [label(name, 20, "name"), f'<clipPath id="{clip}">{shown}</clipPath>']
    parts.append(f'<path class="axis" d="M {left} {top} V {top + height} H {left + width}"/>')
    for kind, curve in (("first", first), ("second", second)):
        points = [
            f"{left + width * k / (len(curve) - 1):.1f},{top + height * (1 - min(max(share, 0.0), 1.0)):.1f}"
            for k, share in enumerate(curve)
        ]
        parts.append(f'<polyline clip-path="url(#{clip})" class="curve {kind}" points="{" ".join(points)}"/>')
    return "".join([*parts, label(notes[0], 208), label(notes[1], 228)])
