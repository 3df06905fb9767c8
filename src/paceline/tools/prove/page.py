"""The frame of the report, and its light and dark style."""

from __future__ import annotations

PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --faint: #667080; --line: #d5dae1; --panel:
  #f6f7f9; --done: #2f9e5b; --failed: #d1383d; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ee; --faint: #97a1af; --line: #343b45;
  --panel: #1c2026; --done: #45b974; --failed: #f0605f; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 72rem; background: var(--paper); color: var(--ink); font:
  15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 0 0 .6rem; font-size: 1.1rem; }
section { margin: 2.2rem 0; }
.facts { color: var(--faint); font-size: .87rem; margin: .4rem 0 0; overflow-wrap: anywhere; }
.picture { overflow-x: auto; max-height: 36rem; overflow-y: auto; background: var(--panel); border: 1px solid
  var(--line); border-radius: 8px; padding: .75rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg .mark { font-size: 11px; paint-order: stroke; stroke: var(--panel); stroke-width: 4px; stroke-linejoin: round; }
svg .name { font-weight: 600; }
svg .grid { stroke: var(--line); }
svg .line { fill: none; }
svg .line:hover { stroke: var(--ink); stroke-width: 4; stroke-opacity: 1; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; white-space: nowrap; border-bottom: 1px solid
  var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
td code { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
