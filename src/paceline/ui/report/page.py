"""The HTML of a report: style, scripts and answers in one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from paceline.ui.report.bundle import bundle_modules
from paceline.ui.web.assets import STATIC, plotly_path
from paceline.ui.web.json_text import encode

_LINK = re.compile(r"^<link .*\n", re.MULTILINE)
_SCRIPT = re.compile(r"^<script .*</script>\n", re.MULTILINE)
_TITLE = re.compile(r"<title>.*</title>")


def render(answers: Mapping[str, Any], *, title: str, light: bool) -> str:
    """Return a page that has these answers, by the path of their question. A light one has no
    Plotly.
    """
    scripts = [bundle_modules(STATIC)]
    if not light:
        scripts.insert(0, plotly_path().read_text(encoding="utf-8"))
    scripts = [_inert(text) for text in scripts]
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = _SCRIPT.sub("", _LINK.sub("", page))
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    head = (
        '<meta http-equiv="Content-Security-Policy" '
        f'content="{_policy(scripts)}">\n<style>\n{style}</style>\n</head>'
    )
    page = page.replace("</head>", head, 1)
    page = _TITLE.sub(lambda _: f"<title>{escape(title)}</title>", page, count=1)
    if light:
        page = page.replace('<html lang="en">', '<html lang="en" data-charts="still">', 1)
    data = f'<script type="application/json" id="answers">{encode_for_script(answers)}</script>'
    plotly, own = (f"<script>{scripts[0]}</script>\n" if not light else ""), scripts[-1]
    return page.replace(
        "</body>", f'{data}\n{plotly}<script type="module">{own}</script>\n</body>', 1
    )


def encode_for_script(answers: Any) -> str:
    """Return JSON that cannot end the script element that it stands in. Numbers that JSON lacks
    become null.
    """
    text = encode(answers).decode("ascii")
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _inert(script: str) -> str:
    """Return a script whose strings cannot end its element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: list[str]) -> str:
    """Return a policy that allows exactly these scripts, and no connection."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )
