"""The files that pages load: ours from this package, and Plotly's JavaScript from its own."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.errors import EnvironmentProblem

STATIC = Path(__file__).parent / "static"
PLOTLY = "plotly.min.js"
# A style element that gets its text from a literal; one with escapes would have another hash, and
# does not occur.
_STYLE_TEXT = re.compile(
    r"""createElement\("style"\).{0,200}?\.textContent=(['"`])((?:(?!\1)[^\\])*)\1"""
)
INDEX = "static/index.html"  # the page itself
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True)
class Asset:
    """A file, also compressed. `tag` changes with its content."""

    content: bytes
    compressed: bytes
    media_type: str
    tag: str


def find_asset(name: str) -> Asset | None:
    """Return a file that pages may load: ours in `static`, Plotly's JavaScript, or the page itself
    (no name).
    """
    path = _known().get(name)
    if path is None:
        return None
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


def plotly_path() -> Path:
    """Return the JavaScript in Plotly's package, which is not imported."""
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / "package_data" / PLOTLY if spec and spec.origin else None
    if path is None or not path.is_file():
        raise EnvironmentProblem(
            "The pages draw with Plotly, which is not installed.",
            hint="Install it: pip install 'paceline[ui]'",
        )
    return path


def style_hashes() -> tuple[str, ...]:
    """Return what a policy has to allow so that Plotly can style its charts, and nothing else can
    use inline styles.

    Its bundle fills an empty style element rule by rule, and clears style attributes. Newer ones
    also add the style of their maps as one text.
    """
    try:
        texts = [
            match[2] for match in _STYLE_TEXT.finditer(plotly_path().read_text(encoding="utf-8"))
        ]
    except (EnvironmentProblem, OSError, ValueError):
        texts = []
    hashes = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in ["", *texts]
    )
    return tuple(f"'sha256-{each}'" for each in hashes)


def _known() -> dict[str, Path]:
    """Return all files by the names that pages use. No path is made of what a page asks for."""
    known = {PLOTLY: plotly_path()}
    for folder, _, files in os.walk(STATIC):
        for file in files:
            path = Path(folder, file)
            if path.suffix in TYPES and not path.is_symlink():
                known[f"static/{path.relative_to(STATIC).as_posix()}"] = path
    if INDEX in known:
        known[""] = known[INDEX]
    return known


@lru_cache(maxsize=128)
def _load(path: Path, _changed: int, _size: int) -> Asset:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, gzip.compress(content, 6, mtime=0), TYPES[path.suffix], tag)
