"""The frame of a report: its light and dark style, and the script that sorts its table."""

from __future__ import annotations

PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
<script>{script}</script>
</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --faint: #667080; --line: #d5dae1; --panel:
  #f6f7f9;
  --accent: #d9540b; --done: #2f9e5b; --pruned: #8a93a0; --failed: #d1383d; --running: #2f7fd6; --pending: #d5dae1;
  --missing: #c99a1d; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ee; --faint: #97a1af; --line:
  #343b45;
  --panel: #1c2026; --accent: #ff8a3d; --done: #45b974; --pruned: #7b8593; --failed: #f0605f; --running: #5ba4f2;
  --pending: #3a424d; --missing: #d8b13a; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 0 0 .6rem; font-size: 1.1rem; } section { margin: 2.2rem 0;
  }
.facts { color: var(--faint); font-size: .87rem; margin: .4rem 0 0; overflow-wrap: anywhere; }
.progress { display: flex; height: 12px; border-radius: 6px; overflow: hidden; margin-top: 1rem; background:
  var(--line); }
.key { margin-right: 1.1rem; } i { display: inline-block; width: .62rem; height: .62rem; border-radius: 50%;
  margin-right: .4rem; }
.done { background: var(--done); } .pruned { background: var(--pruned); } .failed { background:
  var(--failed); }
.running { background: var(--running); } .pending { background: var(--pending); } .missing { background:
  var(--missing); }
.value { font-size: 1.6rem; font-weight: 600; margin: 0; color: var(--accent); }
.picture { overflow-x: auto; max-height: 36rem; overflow-y: auto; background: var(--panel); border: 1px solid
  var(--line);
  border-radius: 8px; padding: .75rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg .mark { font-size: 11px; paint-order: stroke; stroke: var(--panel); stroke-width: 4px; stroke-linejoin:
  round; }
svg .faint { font-size: 11px; font-style: italic; paint-order: stroke; stroke: var(--panel); stroke-width:
  4px; } svg .name { font-weight: 600; }
svg .axis { stroke: var(--faint); stroke-width: 1; } svg .grid { stroke: var(--line); }
svg .line { fill: none; } svg .line:hover { stroke: var(--ink); stroke-width: 4; stroke-opacity: 1; }
svg .dot { fill: var(--running); fill-opacity: .75; } svg .outside { fill: none; stroke: var(--running); }
svg .early { fill: var(--pruned); fill-opacity: .6; } svg .early.outside { fill: none; stroke: var(--pruned); }
svg .line.early { fill: none; stroke: var(--pruned); stroke-opacity: .4; stroke-width: 1.2; }
svg .best { fill: none; stroke: var(--accent); stroke-width: 2; } svg .bar { fill: var(--running); }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; white-space: nowrap; border-bottom: 1px solid
  var(--line); }
tbody tr:last-child > * { border-bottom: 0; } .trials { width: 100%; } .trials th { cursor: pointer;
  position: sticky; top: -.75rem;
  background: var(--panel); } .point { margin-top: .6rem; } .point th { color: var(--faint); font-weight:
  500; }
td code { white-space: pre-wrap; overflow-wrap: anywhere; }
"""

SCRIPT = """
document.querySelectorAll('.trials th').forEach(function (head, column) {
  var up = false;
  function sort() {
    up = !up;
    var body = head.closest('table').tBodies[0];
    var key = function (row) { return row.cells[column].dataset.v; };
    var all = Array.from(body.rows), rest = all.filter(function (row) { return key(row) === ''; });
    var known = all.filter(function (row) { return key(row) !== ''; });
    var numbers = known.every(function (row) { return !isNaN(key(row)); });
    known.sort(function (a, b) { return numbers ? key(a) - key(b) : key(a).localeCompare(key(b)); });
    if (!up) known.reverse();
    known.concat(rest).forEach(function (row) { body.appendChild(row); });
  }
  head.addEventListener('click', sort);
  head.addEventListener('keydown', function (event) { if (event.key === 'Enter') sort(); });
});
"""
