"""A run or a sweep as one HTML file: the dashboard's pages with their answers inside.

The answers are those of the dashboard, thinned out to stay small enough for a mail. The file loads
nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import EnvironmentProblem
from paceline.sweep.report import describe_trials
from paceline.sweep.results import read_sweep
from paceline.ui.text import encode
from paceline.watch.details import read_details, thin_samples
from paceline.watch.metrics import Curve, Curves, MetricsReader, thin
from paceline.watch.records import read_record
from paceline.watch.run_log import LogLine, RunLog

STATIC = Path(__file__).parent / "static"
CURVES = 160_000  # characters of all curves of a run, about
POINT = 30  # characters of a point, about
MIN_POINTS, MAX_POINTS = 40, 1000  # of a curve
SAMPLES = 1500  # of all nodes of a run
LOG = 60_000  # characters of the log
LOG_LINES = 1000
TRIALS = 5  # the best of a sweep, whose own pages a report has

Answers = dict[str, Any]

_IMPORT = re.compile(r'^import \{ ([\w, $]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LOADED = re.compile(r"^<(?:link|script) .*\n", re.MULTILINE)


def run_answers(folder: RunFolder) -> tuple[Answers, str]:
    """Return what a report of a run contains, by the paths of the questions, and its title."""
    answers = _run(folder, folder.key, share=1)
    run = answers[f"api/runs/{quote(folder.key, safe='')}"]["overview"]
    return {**_about("run", folder.key), **answers}, str(run["name"] or folder.key)


def sweep_answers(folder: SweepFolder) -> tuple[Answers, str]:
    """Return the same for a sweep, with the pages of its best trials."""
    sweep = read_sweep(folder)
    described = describe_trials(sweep)
    answers = {**_about("sweep", sweep.name), f"api/sweeps/{quote(sweep.name, safe='')}": described}
    for number in [row["number"] for row in described["rows"] if row["counts"]][:TRIALS]:
        trial = folder.trial(number)
        if trial.run_json.is_file():
            answers |= _run(trial, f"{sweep.name}-{number}", share=TRIALS)
    return answers, sweep.name


def _about(kind: str, key: str) -> Answers:
    return {"about": {"page": f"{kind}/{quote(key, safe='')}", "time": time.time()}}


def _run(folder: RunFolder, key: str, *, share: int) -> Answers:
    """Return the answers about one run; `share` runs share the space."""
    path = f"api/runs/{quote(key, safe='')}"
    details = read_details(read_record(folder)).to_json()
    nodes = details["nodes"]
    samples = SAMPLES // share // max(1, sum(1 + len(node["gpus"]) for node in nodes))
    curves = Curves()
    curves.add(MetricsReader(folder.metrics).read_new())
    found = curves.all()
    points = max(MIN_POINTS, min(MAX_POINTS, CURVES // share // POINT // max(1, len(found))))
    return {
        path: {**details, "nodes": [_thin_node(node, max(2, samples)) for node in nodes]},
        f"{path}/curves": {"curves": [thin_curve(curve, points) for curve in found]},
        f"{path}/log": {"lines": _log(folder, LOG // share)},
    }


def thin_curve(curve: Curve, points: int) -> dict[str, Any]:
    """Return at most so many points, about, with all spikes."""
    kept = list(zip(curve.steps, curve.times, curve.values, strict=True))
    if len(kept) > points:
        kept = thin(kept, max(1, points // 2))
    return {
        "name": curve.name,
        "steps": [step for step, _, _ in kept],
        "times": [round(time, 1) for _, time, _ in kept],
        "values": [float(f"{value:.6g}") for _, _, value in kept],
    }


def _thin_node(node: Mapping[str, Any], count: int) -> dict[str, Any]:
    names = ("time", "cpu", "memory", "gpus")
    samples = thin_samples(node["samples"], count)
    return {
        **node,
        "samples": [{name: each[name] for name in names if name in each} for each in samples],
    }


def _log(folder: RunFolder, size: int) -> list[dict[str, Any]]:
    """Return the last lines, in so many characters."""
    lines: list[dict[str, Any]] = []
    for line in reversed(lines_to_json(RunLog(folder).tail(LOG_LINES))):
        line["text"] = line["text"][:2000]
        size -= len(line["text"]) + 50
        if size < 0:
            break
        lines.append(line)
    return lines[::-1]


def lines_to_json(lines: Iterable[LogLine]) -> list[dict[str, Any]]:
    return [
        {"time": each.time, "rank": each.rank, "attempt": each.attempt, "text": each.text}
        for each in lines
    ]


# -- the page --------------------------------------------------------------------------------------


def plotly_path() -> Path:
    """Return the JavaScript in Plotly's package, which is not imported."""
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / "package_data/plotly.min.js" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise EnvironmentProblem(
            "The pages draw with Plotly, which is not installed.",
            hint="Install it: pip install 'paceline[ui]'",
        )
    return path


def render(answers: Mapping[str, Any], *, title: str, light: bool) -> str:
    """Return a page that has these answers, by the path of their question. A light one has no
    Plotly.
    """
    scripts = [_inert(bundle_modules(STATIC))]
    if not light:
        scripts.insert(0, _inert(plotly_path().read_text(encoding="utf-8")))
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    # the policy allows exactly these scripts
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
        for each in scripts
    )
    policy = (
        f"default-src 'none'; script-src {allowed}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    data = (
        encode(answers)
        .decode("ascii")
        .translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "&<>"})
    )
    page = _LOADED.sub("", (STATIC / "index.html").read_text(encoding="utf-8"))
    for old, new in {
        "<title>Paceline</title>": f"<title>{escape(title)}</title>",
        "</head>": f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>\n{style}</style>\n</head>",
        '<html lang="en">': f'<html lang="en" data-charts="{"still" if light else "live"}">',
        "</body>": f'<script type="application/json" id="answers">{data}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts[:-1])
        + f'<script type="module">{scripts[-1]}</script>\n</body>',
    }.items():
        page = page.replace(old, new, 1)
    return page


def _inert(script: str) -> str:
    """Return a script whose strings cannot end its element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def bundle_modules(folder: Path, entry: str = "app") -> str:
    """Return an ES module and all that it imports as one script: a page that is opened as a file
    cannot import any.

    Each module becomes a function that returns its exports, and what it imports is taken from the
    functions before it.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / f"{name}.js").read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(text):
            if other not in parts:
                add(other)
        exported = ", ".join(_EXPORT.findall(text))
        body = _EXPORT.sub("", _IMPORT.sub(r"const { \1 } = $\2;\n", text))
        parts[name] = f"const ${name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"

    add(entry)
    return '"use strict";\n' + "".join(parts.values())
