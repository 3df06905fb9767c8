"""A sweep as one self-contained HTML file, which works without a network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.contract.sweep.folder import FAILED, PRUNED
from paceline.errors import EnvironmentProblem
from paceline.spec.quantities import show_seconds
from paceline.sweep.report import plots
from paceline.sweep.report.axes import to_label
from paceline.sweep.report.configs import Configs, read_configs
from paceline.sweep.report.importance import MIN_TRIALS, importances
from paceline.sweep.report.rows import Row, best_first, has_repeats, rows
from paceline.sweep.report.template import PAGE, SCRIPT, STYLE
from paceline.sweep.results import MISSING, Sweep, Trial

MAX_ROWS = 1000  # of the table; --csv writes all
MAX_FAILURES = 200


def render(sweep: Sweep) -> str:
    """Return the whole page."""
    ordered = best_first(sweep, rows(sweep))
    valued = [row for row in ordered if row.counts]
    pruned = [row for row in ordered if row.is_pruned and row.value is not None]
    configs = read_configs(sweep, ordered[:MAX_ROWS])
    body = [_head(sweep), _progress(sweep), _best(sweep, valued), *_plots(sweep, valued, pruned)]
    body += [_table(sweep, ordered, configs), _settings(configs)]
    body += [_failures([trial for trial in sweep.trials if trial.state in (FAILED, MISSING)])]
    return PAGE.format(title=escape(f"sweep {sweep.name}"), style=STYLE, body="\n".join(body), script=SCRIPT)


def _head(sweep: Sweep) -> str:
    aim = "larger is better" if sweep.maximizes else "smaller is better"
    facts = [
        f"{sweep.metric}, {aim}",
        f"{len(sweep.trials):,} trials",
        *([f"sampler {sweep.spec['sampler']}"] if sweep.spec.get("sampler") else []),
        f"as of {time.strftime('%Y-%m-%d %H:%M')}",
    ]
    return f"<h1>{escape(sweep.name)}</h1><p class='facts'>{escape(' · '.join(facts))}</p>"


def _progress(sweep: Sweep) -> str:
    total = max(1, len(sweep.trials))
    pieces = [
        f'<span class="{state}" style="width:{100 * count / total:.3f}%"></span>'
        for state, count in sweep.counts.items()
    ]
    labels = [
        f'<span class="key"><i class="{state}"></i>{count:,} {state}</span>' for state, count in sweep.counts.items()
    ]
    return f'<div class="progress">{"".join(pieces)}</div><p class="facts">{"".join(labels)}</p>'


def _best(sweep: Sweep, valued: Sequence[Row]) -> str:
    if not valued:
        return "<p>No trial has a value yet.</p>"
    best = valued[0]
    point = {key: best.point[key] for key in sweep.keys if key in best.point}
    return (
        f'<section><h2>Best</h2><p class="value">{escape(plots.value_text(best, 6))}</p>'
        f'<p class="facts">trial {best.number} · {escape(str(best.trials[0].folder.path))}</p>'
        f"{_pairs(point)}</section>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    lines = (f"<tr><th>{escape(key)}</th><td>{escape(to_label(value))}</td></tr>" for key, value in values.items())
    return f'<table class="point">{"".join(lines)}</table>'


def _settings(configs: Configs) -> str:
    """Return what all scripts have passed to `run.config` alike; the rest are columns of the table."""
    if not configs.common:
        return ""
    return f"<section><h2>Settings of all trials</h2>{_pairs(configs.common)}</section>"


def _plots(sweep: Sweep, valued: Sequence[Row], pruned: Sequence[Row]) -> list[str]:
    if not valued:
        return []
    found = []
    early = f" Grey: {len(pruned):,} pruned, at their last report." if pruned else ""
    if sweep.keys:
        note = f"One line per point; the best are orange and on top.{early} Hover over a line to read it."
        if max(len(valued), len(pruned)) > plots.MAX_LINES:
            note += f" Shows {plots.MAX_LINES} of {len(valued):,} points: the best, and an even share of the others."
        found.append(_section("Parallel coordinates", plots.parallel(sweep, valued, pruned), note))
        found.append(_importance(sweep))
    note = f"Each dot is a trial; the line is the best value so far.{early} Rings are values outside the plot."
    return [*found, _section("History", plots.history(sweep, valued, pruned), note)]


def _importance(sweep: Sweep) -> str:
    try:
        shares = importances(sweep)
    except EnvironmentProblem as problem:  # the rest of the page works without Optuna
        return _section("Importance", "", f"{problem.message} {problem.hint}")
    if not shares:
        return _section("Importance", "", f"Shown once {MIN_TRIALS} trials have ended, for parameters that vary.")
    note = "How much each parameter distinguishes the best fifth of the trials from the rest (PED-ANOVA)."
    return _section("Importance", plots.bars(shares), note)


def _section(title: str, plot: str, note: str) -> str:
    frame = f'<div class="picture">{plot}</div>' if plot else ""
    return f"<section><h2>{title}</h2>{frame}<p class='facts'>{escape(note)}</p></section>"


def _table(sweep: Sweep, ordered: Sequence[Row], configs: Configs) -> str:
    keys = sweep.keys
    names = ["trial", "state", sweep.metric, *keys, *configs.varying, "time"]
    head = "".join(f"<th tabindex='0'>{escape(name)}</th>" for name in names)
    lines = [_line(row, keys, configs) for row in ordered[:MAX_ROWS]]
    note = "Click a column header to sort."
    if has_repeats(sweep):
        note += " Values are means ± sample standard deviations over the seeds that have ended."
    if len(ordered) > MAX_ROWS:
        note += f" Shows {MAX_ROWS:,} of {len(ordered):,} rows; `paceline sweep show --csv` writes all."
    return (
        f"<section><h2>Trials</h2><div class='picture'><table class='trials'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div><p class='facts'>{escape(note)}</p></section>"
    )


def _line(row: Row, keys: Sequence[str], configs: Configs) -> str:
    settings = [configs.value(row, name) for name in configs.varying]
    cells = [
        (str(row.number), row.number),
        (f'<i class="{row.state}"></i>{row.status}{_pruned_at(row)}', row.state),
        (escape(plots.value_text(row)), "" if row.value is None else row.value),
        *((escape(to_label(row.point[key])), row.point[key]) if key in row.point else ("", "") for key in keys),
        *(("", "") if value is None else (escape(to_label(value)), value) for value in settings),
        ("" if row.seconds is None else show_seconds(row.seconds), "" if row.seconds is None else row.seconds),
    ]
    written = [f'<td data-v="{escape(str(key))}">{text}</td>' for text, key in cells]
    return f"<tr>{''.join(written)}</tr>"


def _pruned_at(row: Row) -> str:
    steps = [trial.step for trial in row.trials if trial.step is not None]
    return f" at step {max(steps)}" if row.state == PRUNED and len(row.trials) == 1 and steps else ""


def _failures(failed: Sequence[Trial]) -> str:
    if not failed:
        return ""
    lines = [
        f"<tr><td>{trial.number}</td><td><code>{escape(trial.error or 'no error recorded')}</code></td>"
        f"<td>{escape(str(trial.folder.path))}</td></tr>"
        for trial in failed[:MAX_FAILURES]
    ]
    more = f"<p class='facts'>and {len(failed) - MAX_FAILURES:,} more</p>" if len(failed) > MAX_FAILURES else ""
    return f"<section><h2>Failures</h2><div class='picture'><table>{''.join(lines)}</table></div>{more}</section>"
