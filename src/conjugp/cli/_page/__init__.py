"""The report as one HTML page: no network, no fonts to load, light and dark.

All text of the user goes through Jinja's escaping, and the page's own policy lets no script run
but the one that it was made with.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

HERE = Path(__file__).parent
_DARK = (
    "--paper: #161b22; --ink: #e6edf3; --soft: #9aa6b2; --line: #30363d; --ground: #0d1117; "
    "--accent: #6cb0ff; --other: #f0a35e; --bad: #ff8a80; "
    "--warn-ground: #332a10; --warn-ink: #f2d48a; --heat: 88 150 230; --miss: 220 80 70; "
    "--shade: rgb(230 237 243 / .3);"
)
_LIGHT_INK, _LIGHT_PAPER = (0x1B, 0x1F, 0x24), (0xFF, 0xFF, 0xFF)
_DARK_INK, _DARK_PAPER = (0xE6, 0xED, 0xF3), (0x16, 0x1B, 0x22)
_STEPS = 20  # shades between ink and paper
# The colours of the pictures' lines, as they are drawn and as the page has them.
COLORS = {
    **{"#1f77b4": "var(--accent)", "#0072b2": "var(--accent)"},
    **{"#ff7f0e": "var(--other)", "#e69f00": "var(--other)"},
}


def render(data: dict[str, Any]) -> str:
    """The page for what `report` found."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=False, lstrip_blocks=False
    )
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    script = (HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    macros = environment.get_template("rows.html").module
    return environment.get_template("report.html").render(
        **data,
        row_cells=macros.row_cells,  # type: ignore[attr-defined]
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        style=Markup(_style()),
    )


def _style() -> str:
    """The style sheet with the colours of both themes filled in."""
    style = (HERE / "report.css").read_text(encoding="utf-8")
    style = style.replace("NEUTRALS_LIGHT", _neutrals(_LIGHT_INK, _LIGHT_PAPER))
    style = style.replace("NEUTRALS_DARK", _neutrals(_DARK_INK, _DARK_PAPER))
    return style.replace("DARK", _DARK)


def _neutrals(ink: tuple[int, ...], paper: tuple[int, ...]) -> str:
    """Variables --n0, the ink, to --n20, the paper."""
    shades = []
    for i in range(_STEPS + 1):
        mixed = (round(a + (b - a) * i / _STEPS) for a, b in zip(ink, paper, strict=True))
        shades.append(f"--n{i}: #{''.join(f'{part:02x}' for part in mixed)};")
    return " ".join(shades)


def picture(figure: Any, name: str, description: str) -> Markup:
    """A figure of matplotlib's as inline SVG, its greys and lines in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False}
    with rc_context(settings), warnings.catch_warnings():
        # Signs that matplotlib's font lacks are drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
    # Several pictures stand in one page, and ids are the page's.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", _themed, svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    return Markup(f"<figure>{svg}</figure>")


def _themed(found: re.Match[str]) -> str:
    """A colour by the name it has in the style sheet; greys lie between ink and paper."""
    color = found[0]
    if color in COLORS:
        return COLORS[color]
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    if red == green == blue:
        return f"var(--n{round(red / 255 * _STEPS)})"
    return color
