"""Commands that watch runs: `logs`, `submit --wait` and `submit --follow`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import __main__, cli
from paceline.cli.commands import cancel, logs, show, submit
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import JobState
from paceline.watch import run_log
from paceline.watch.log_file import keep_colours
from paceline.watch.records import read_record
from paceline.watch.run_log import LogLine
from tests.sweep.folders import end, grid, make_sweep


@pytest.fixture
def folder(scratch: Path, tmp_path: Path) -> Iterator[RunFolder]:
    """The folder of a run, in the scratch folder of this process."""
    made = RunFolder(scratch / "project" / "default" / "20260101-120000-1a2b")
    made.events.mkdir(parents=True)
    made.run_json.write_text(
        json.dumps({"run_id": made.path.name, "nodes": 1, "nproc": 2, "host": "here"})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        patch.chdir(tmp_path)
        yield made


def interrupt(*_: Any, **__: Any) -> Iterator[list[LogLine]]:
    yield [LogLine(None, 0, 1, "loss 1.5")]
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["logs", "follow", "wait"])
def test_ctrl_c_says_that_the_run_goes_on(
    command: str,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = folder.path.name
    monkeypatch.setattr(logs, "follow", interrupt)
    monkeypatch.setattr(run_log, "wait_until_over", lambda *_: list(interrupt()))
    watch: Callable[[], object] = lambda: submit.wait_until_done(folder, follow=command == "follow")  # noqa: E731
    if command == "logs":
        with pytest.raises(SystemExit) as left:
            cli.main(["logs", "-f", run])
        assert left.value.code == 130
    else:
        with pytest.raises(KeyboardInterrupt):
            watch()
    assert (
        f"{run} keeps running; watch it: paceline logs -f {run}; cancel it: paceline cancel {run}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("save", [False, True])
def test_cancel_says_whether_the_run_saves_first(
    save: bool,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, state = folder.path.name, {"7": JobState("7", "RUNNING")}
    folder.job.write_text("7\n")
    monkeypatch.setattr(
        cancel, "read_record", lambda folder, _: read_record(folder, lambda jobs: state)
    )
    monkeypatch.setattr(slurm, "call", lambda argv, **_: slurm.Completed(argv, 0, "", ""))
    how = ["--save"] if save else []
    assert cli.dispatch(["cancel", *how, run]) == 0
    first = f"cancelling {run} (job 7): it saves first\n" if save else f"cancelled {run} (job 7)\n"
    assert capsys.readouterr().out.startswith(first)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[31mred\x1b[0m \x1b[38;5;9mmore\x1b[m", None),
        ("10%\r\x1b[K20%\t\u00e9\b", "10%20%\t\u00e9"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;aHVzaA==\x1b\\b", "ab"),
        ("a\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1bP$q\x1b\\b", "ab"),
        ("a\x1b[2J\x1b[H\x1b[6n\x1b[?1049h\x1bcb", "ab"),
        ("a\x1b(0b\x1b[>4;1mc", "abc"),
        ("a\x9b2Jb\x07\x0e", "a2Jb"),
        ("a\x1b]0;no end", "a"),
    ],
)
def test_a_terminal_gets_text_and_colours_alone(printed: str, shown: str | None) -> None:
    assert keep_colours(printed) == (printed if shown is None else shown)


@pytest.mark.parametrize("command", ["logs", "logs -f", "submit --follow"])
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_logs_of_a_script_that_writes_to_the_terminal(
    command: str, stream: type[io.StringIO], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\x1b]0;title\x07\x1b[32mloss 1.5\x1b[0m\n"
    (folder.path / "slurm.log").write_text(text)
    folder.attempt(1).path.mkdir()
    folder.attempt(1).log(0).write_text(text)
    monkeypatch.setattr(sys, "stdout", stream())
    if command == "submit --follow":
        submit.wait_until_done(folder, follow=True)
    else:
        logs.command(folder.path.name, follow=command == "logs -f", rank=0)
    assert isinstance(sys.stdout, io.StringIO)
    shown = text if stream is io.StringIO else "\x1b[32mloss 1.5\x1b[0m\x1b[0m\n"
    assert sys.stdout.getvalue() == shown


def test_wait_says_where_to_look_after_a_killed_batch_shell(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_start = folder.job_start("7-0")
    job_start.path.mkdir(parents=True)
    job_start.agent.write_text("1\n")
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to(job_start.path.name)
    folder.job.write_text("7\n")
    ended = read_record(folder, lambda _: {"7": JobState("7", "FAILED", exit_code="0:9")})
    monkeypatch.setattr(run_log, "wait_until_over", lambda *_: ended)
    assert submit.wait_until_done(folder, follow=False) == 1
    said = capsys.readouterr().err
    assert f"output of the job: {folder.slurm_log}" in said
    assert (
        f"to continue: paceline submit --resume {folder.path.name} (its ranks had not started)"
        in said
    )


def test_show_has_the_name_and_indents_what_has_several_lines(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.run_json.write_text(json.dumps({"name": "lm-big", "nodes": 1, "nproc": 2}))
    attempt = folder.attempt(1)
    attempt.path.mkdir()
    attempt.verdict.write_text("failed\n")
    failure = {
        "rank": 1,
        "host": "n2",
        "type": "RuntimeError",
        "message": "no GPU\nTry again",
        "where": "train.py:9",
    }
    attempt.failure.write_text(json.dumps(failure))
    show.command("lm-b")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"run        {folder.path.name}", "name       lm-big"]
    first = lines.index("attempt 1  failed: rank 1 on n2: RuntimeError: no GPU")
    assert lines[first + 1 : first + 3] == ["           Try again", "           at train.py:9"]


@pytest.mark.parametrize("command", ["show", "logs", "cancel"])
def test_the_name_of_a_sweep_leads_to_its_commands(
    command: str, folder: RunFolder, scratch: Path
) -> None:
    make_sweep(scratch / "project" / "default" / "my sweep", grid({"lr": n} for n in range(4)))
    with pytest.raises(UsageError, match="'my sweep' is a sweep") as error:
        cli.dispatch([command, "my sweep"])
    verb = "cancel" if command == "cancel" else "show"
    assert f"paceline sweep {verb} 'my sweep'`" in error.value.hint
    assert "'my sweep-0'" in error.value.hint
    with pytest.raises(UsageError, match="There is no run 'my'"):
        cli.dispatch([command, "my"])


def test_without_runs_the_newest_sweep_is_named(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_sweep(scratch / "project" / "default" / "tiny", grid([{"lr": 1}]))
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        with pytest.raises(UsageError, match="'last' is a sweep") as error:
            cli.dispatch(["show"])
    assert "paceline sweep show tiny" in error.value.hint


def test_a_trial_is_called_by_its_sweep(
    folder: RunFolder, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(scratch / "project" / "default" / "tiny", grid({"lr": n} for n in range(4)))
    end(sweep, 3, "failed", error="ValueError: no")
    attempt = sweep.trial(3).attempt(1)
    attempt.path.mkdir()
    attempt.failure.write_text(
        json.dumps({"rank": 0, "host": "n1", "type": "ValueError", "message": "no"})
    )
    assert cli.dispatch(["show", "tiny-3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run        tiny-3\n")
    assert "continue   paceline sweep --local --resubmit failed tiny " in shown
    assert "paceline logs tiny-3" in shown
    with pytest.raises(UsageError, match="Run tiny-3 has no attempt 7"):
        cli.dispatch(["logs", "--attempt", "7", "tiny-3"])
    assert cli.dispatch(["cancel", "tiny-3"]) == 0
    assert capsys.readouterr().out.startswith("tiny-3 has already ended")


@pytest.mark.parametrize("command", ["ps", "show"])
def test_without_slurm_the_commands_say_what_to_do(
    command: str,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder.job.write_text("7\n")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        assert cli.dispatch([command]) == 0
    printed = capsys.readouterr()
    assert "squeue is not installed here" in printed.out
    assert "Run this on a login node of your cluster" in printed.out + printed.err


def test_logs_that_do_not_exist_say_what_there_is_instead(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, state = folder.path.name, {"7": JobState("7", "PENDING", reason="Priority")}
    folder.job.write_text("7\n")
    monkeypatch.setattr(logs, "read_record", lambda folder: read_record(folder, lambda jobs: state))

    def problem(*args: str) -> tuple[str, str]:
        with pytest.raises(UsageError) as error:
            cli.dispatch(["logs", *args, run])
        return error.value.message, error.value.hint

    waits = f"See `paceline logs -f {run}`."
    queued = "the run is queued (waits for nodes: other jobs come first)."
    assert problem() == (f"There is no output yet; {queued}", waits)
    assert problem("--rank", "0") == (f"There is no log of rank 0 yet; {queued}", waits)
    assert problem("--rank", "2") == (f"Run {run} has no rank 2.", "Its last is 1.")
    state["7"] = JobState("7", "FAILED")
    assert problem() == ("There is no output; the run has failed.", f"See `paceline show {run}`.")
    folder.slurm_log.write_text("no such module\n")
    assert cli.dispatch(["logs", run]) == 0
    assert capsys.readouterr().out == "no such module\n"
    folder.attempt(1).path.mkdir()
    assert problem("--attempt", "3") == (f"Run {run} has no attempt 3.", "Its attempts: 1.")


def test_lines_of_ps_end_with_their_text_in_a_pipe(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunFolder(folder.path.with_name("20260101-120001-3c4d"))
    other.path.mkdir()
    other.run_json.write_text(
        json.dumps({"nodes": 1, "nproc": 2, "name": "a much longer name", "host": "a long host"})
    )
    assert cli.dispatch(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert [line.rstrip() for line in lines] == lines


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "_main", interrupted)
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 130
