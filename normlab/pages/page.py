"""Render a self-contained HTML page from sections (Jinja templates), plot data and scripts; works offline.

`render` takes sections of any report (a comparison, a run, a stability check). `section` renders each from a template
with its own context. Templates escape user text; `data` is passed to the scripts as JSON.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError

_EXPONENT = re.compile(r"(?<![\w.])\d+(?:\.\d+)?e-\d+")

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """A section of a page: anchor, heading, and escaped HTML."""

    slug: str
    title: str
    html: str


def section(slug: str, title: str, template: str, **context: Any) -> Section:
    """Render a section from a template in `templates/`."""
    return Section(slug, title, _environment().get_template(template).render(**context))


def render(
    title: str,
    sections: Sequence[Section],
    data: Mapping[str, Any],
    *,
    headline: str = "",
    tone: str = "",
    findings: Sequence[str] = (),
    cautions: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    plots: bool = True,
    live: bool = False,
) -> str:
    """Render the whole page.

    `scripts` are files in `templates/` that draw from `data` after the page has loaded, `styles` are style sheets of
    this page alone; `tone` colours the headline: ok, warn, fail. A page without `plots` is 5 MB smaller. A `live` page
    may ask the server that it came from for data.
    """
    return (
        _environment()
        .get_template("base.html")
        .render(
            title=title, sections=sections, headline=headline, tone=tone, findings=findings, cautions=cautions,
            facts=facts, style="".join(map(_static, ("style.css", *styles))),
            scripts=[*map(_static, ("shell.js", *scripts))], data=embed(data), plots=plots, live=live,
            plotly=_plotly() if plots else "",
        )
    )  # fmt: skip


def install_command(versions: Mapping[str, str]) -> list[str]:
    """The line that installs the versions that made a result; none where they were not recorded."""
    # Without the build after the plus: PyPI does not have torch 2.13.0+cpu, and asked for 2.13.0 pip keeps that one.
    packages = [f"{name}=={str(versions[name]).partition('+')[0]}" for name in ("normlab", "torch") if name in versions]
    return [f"pip install {shlex.join(packages)}"] if packages else []


def _static(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def embed(data: Any) -> str:
    """JSON for embedding in a <script>: tags are escaped, and non-finite numbers become null."""
    text = json.dumps(_strict(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _strict(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value


@cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise _missing("jinja2") from None
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["unbroken"] = unbroken
    return environment


def unbroken(text: Any) -> Any:
    """Escaped text whose numbers stay on one line: a browser breaks 1e-3 behind its hyphen."""
    from markupsafe import Markup, escape

    return Markup(_EXPONENT.sub(r'<span class="whole">\g<0></span>', str(escape(text))))


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise _missing("plotly") from None
    # In a JavaScript string the backslash has no effect; in HTML the unescaped tag would end the script.
    return get_plotlyjs().replace("</script", "<\\/script")


def _missing(package: str) -> NormLabError:
    return NormLabError(f"a report needs {package}, which is not installed; try: pip install {package}")
