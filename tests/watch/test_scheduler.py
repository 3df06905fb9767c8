"""The shared answer of Slurm: who asks, how often, and what the run folder knows better."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError, NoAnswer, UsageError
from paceline.slurm import answer_cache, squeue_and_sacct
from paceline.slurm import commands as slurm
from paceline.slurm.answer_cache import Answer, AnswerCache
from paceline.slurm.job_states import JobState
from paceline.watch.records import read_record, read_records
from paceline.watch.scheduler import poll_interval, query_states
from tests.launch.slurm.test_commands import put_command
from tests.watch.test_records import make_run


class FakeSlurm:
    """A queue and accounting that count how often they are asked, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.jobs: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        self.later: dict[str, str] = {}  # the jobs that are there after a pause
        self.problem = ""
        self.seconds = 0.0  # that squeue takes
        self.calls: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.jobs |= self.later

    def queue(self) -> dict[str, JobState]:
        self.calls.append("squeue")
        self.now += self.seconds
        if self.problem:
            raise NoAnswer(self.problem, hint="Check it.")
        return {job: JobState(job, state) for job, state in self.jobs.items()}

    def accounting(self, jobs: Iterable[str]) -> dict[str, JobState]:
        self.calls.append(f"sacct {' '.join(jobs)}")
        return {job: JobState(job, self.ended[job]) for job in jobs if job in self.ended}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A Slurm whose answers are shared in a file of this test, for 60 s."""
    made = FakeSlurm()
    with monkeypatch.context() as patch:
        put_command(tmp_path, "squeue", "exit 9")
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        patch.setattr(answer_cache, "MEMORY", str(tmp_path))
        patch.setattr(squeue_and_sacct, "queue", made.queue)
        patch.setattr(squeue_and_sacct, "accounting", made.accounting)
        patch.setattr(time, "time", lambda: made.now)
        patch.setattr(time, "sleep", made.sleep)
        yield made


def put_time(path: Path, when: float) -> None:
    os.utime(path, (when, when), follow_symlinks=False)


def submitted(
    tmp_path: Path, fake: FakeSlurm, *, ago: float, job: str = "7", verdict: str = ""
) -> RunFolder:
    """A run whose job was submitted, and has started, so many seconds ago."""
    folder = make_run(tmp_path / "scratch", f"20260101-000000-{job}", job=job, verdict=verdict)
    for path in (folder.job, folder.claims / "1"):
        put_time(path, fake.now - ago)
    return folder


def test_one_answer_counts_for_all_jobs_and_for_a_minute(fake: FakeSlurm) -> None:
    fake.jobs = {"7": "RUNNING", "8": "PENDING"}
    for second in range(0, 3600, 2):
        fake.now = 1_000_000.0 + second
        assert query_states(["7"])["7"].label == "running"
        assert query_states(["8", "7"])["8"].label == "queued"
    assert fake.calls == ["squeue"] * 60


def test_a_command_that_changes_the_queue_makes_the_next_look_fresh(fake: FakeSlurm) -> None:
    fake.jobs = {"7": "RUNNING"}
    query_states(["7"])
    fake.jobs = {"7": "CANCELLED"}
    fake.now += 1
    assert query_states(["7"])["7"].label == "running"
    slurm.forget_answer()
    fake.now += 1
    assert query_states(["7"])["7"].label == "cancelled"
    assert len(fake.calls) == 2


def test_a_clock_that_was_set_back_does_not_make_every_look_ask(fake: FakeSlurm) -> None:
    fake.jobs = {"7": "RUNNING"}
    query_states(["7"])
    slurm.forget_answer()
    fake.now -= 3600
    for _ in range(5):
        fake.now += 3
        query_states(["7"])
    assert len(fake.calls) == 2


def test_an_answer_that_was_under_way_while_the_queue_changed_does_not_count(
    fake: FakeSlurm,
) -> None:
    fake.jobs = {"7": "RUNNING"}
    whole = fake.queue

    def slow_queue() -> dict[str, JobState]:
        found = whole()
        fake.now += 1
        slurm.forget_answer()  # another process cancels the job before this answer is written
        fake.now += 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squeue_and_sacct, "queue", slow_queue)
        query_states(["7"])
    fake.jobs = {"7": "CANCELLED"}
    assert query_states(["7"])["7"].label == "cancelled"


def test_a_controller_that_fails_is_asked_less_and_less_and_all_share_the_failure(
    fake: FakeSlurm,
) -> None:
    fake.problem = "squeue did not respond within 60 s."
    asked = []
    for second in range(1200):
        fake.now = 1_000_000.0 + second
        before = len(fake.calls)
        with pytest.raises(ClusterError, match="did not respond") as caught:
            query_states(["7"])
        assert "Check it. Paceline asks again in " in caught.value.hint
        if len(fake.calls) > before:
            asked.append(second)
    assert asked == [0, 60, 180, 420, 720, 1020]
    fake.problem, fake.jobs = "", {"7": "RUNNING"}
    fake.now += 300
    assert query_states(["7"])["7"].label == "running"
    fake.now += 61
    query_states(["7"])
    assert len(fake.calls) == len(asked) + 2, "it answers again, so it is asked every minute again"


def test_nobody_waits_for_a_controller_that_hangs_at_every_look(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sandbox, whose interval is shorter than the time until squeue gives up."""
    fake.problem, fake.seconds = "squeue failed: Socket timed out on send/recv operation.", 17.0
    began = fake.now
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_POLL_INTERVAL", "2")
        while fake.now < began + 200:
            with pytest.raises(ClusterError, match="timed out"):
                query_states(["7"])
            fake.now += 1
    assert 4 <= len(fake.calls) <= 5


def test_a_job_that_is_over_is_asked_for_again_after_a_command_that_changes_the_queue(
    tmp_path: Path, fake: FakeSlurm
) -> None:
    """It may have requeued the job. A controller that hangs is asked once for that."""
    folder = submitted(tmp_path, fake, ago=300)
    fake.jobs = {"7": "COMPLETED"}
    folder.job_start("7-0").verdict.write_text("done\n")
    put_time(folder.job_start("7-0").verdict, fake.now - 10)
    assert (read_record(folder).status, fake.calls) == ("done", ["squeue"])
    fake.now += 1
    slurm.forget_answer()
    fake.now += 1
    fake.jobs = {"7": "PENDING"}
    assert (read_record(folder).status, fake.calls) == ("queued", ["squeue"] * 2)
    fake.jobs, fake.now = {"7": "COMPLETED"}, fake.now + 100
    assert (read_record(folder).status, fake.calls) == ("done", ["squeue"] * 3)
    fake.now, fake.problem = fake.now + 1, "It hangs."
    slurm.forget_answer()
    for _ in range(3):
        fake.now += 1
        assert read_record(folder).status == "done"
    assert fake.calls == ["squeue"] * 4


def test_a_slow_controller_is_asked_less_often(fake: FakeSlurm) -> None:
    fake.jobs, fake.seconds = {"7": "RUNNING"}, 20.0
    while fake.now < 1_000_000 + 3600:
        query_states(["7"])
        fake.now += 1
    assert 10 <= len(fake.calls) <= 15


@pytest.mark.parametrize("moment", [{"7": "NODE_FAIL"}, {"7": "COMPLETED"}, {}])
def test_a_live_job_that_looks_over_for_a_moment_is_not_shown_as_over(
    tmp_path: Path, fake: FakeSlurm, moment: dict[str, str]
) -> None:
    folder = submitted(tmp_path, fake, ago=500)
    fake.jobs = {"7": "RUNNING"}
    assert read_record(folder).status == "running"
    fake.now += 61
    fake.jobs, fake.later = moment, {"7": "PENDING"}
    assert read_record(folder).status == "queued"
    assert fake.calls == ["squeue"] * 3


def test_the_end_of_a_cancelled_run_is_no_surprise(tmp_path: Path, fake: FakeSlurm) -> None:
    folder = submitted(tmp_path, fake, ago=500)
    fake.jobs = {"7": "RUNNING"}
    read_record(folder)
    fake.now += 61
    fake.jobs = {"7": "CANCELLED"}
    folder.cancelled.touch()
    put_time(folder.cancelled, fake.now - 1)
    assert read_record(folder).status == "cancelled"
    assert fake.calls == ["squeue"] * 2


def test_a_run_that_was_queued_in_the_answer_and_is_done_by_now_is_done(
    tmp_path: Path, fake: FakeSlurm
) -> None:
    folder = submitted(tmp_path, fake, ago=500)
    (folder.claims / "1").unlink()
    fake.jobs = {"7": "PENDING"}
    assert read_record(folder).status == "queued"
    fake.now += 30
    (folder.claims / "1").symlink_to("7-0")
    put_time(folder.claims / "1", fake.now - 20)
    folder.job_start("7-0").verdict.write_text("done\n")
    put_time(folder.job_start("7-0").verdict, fake.now - 1)
    fake.jobs = {"7": "COMPLETED"}
    assert read_record(folder).status == "done"


def test_a_job_that_is_missing_is_asked_for_again_then_looked_up_in_accounting_once(
    tmp_path: Path, fake: FakeSlurm
) -> None:
    fake.jobs = {"9": "RUNNING"}
    query_states(["9"])
    fake.now += 30
    fake.ended = {"7": "TIMEOUT"}
    runs = [submitted(tmp_path, fake, ago=500, job=job) for job in ("7", "8")]
    for _ in range(10):
        assert [record.status for record in read_records(runs)] == ["timed out", "lost"]
        fake.now += 3
    assert fake.calls == ["squeue", "squeue", "sacct 7 8"]
    fake.now += 300
    assert [record.status for record in read_records(runs)] == ["timed out", "lost"]
    assert fake.calls[3:] == ["squeue", "sacct 8"], (
        "an ended job does not change; the other may appear there late"
    )


def test_a_job_that_is_newer_than_the_answer_is_queued(tmp_path: Path, fake: FakeSlurm) -> None:
    """It was submitted on another machine, which cannot make this one ask again."""
    query_states(["9"])
    fake.calls.clear()
    fake.now += 1
    folder = submitted(tmp_path, fake, ago=0)
    (folder.claims / "1").unlink()
    assert read_record(folder).status == "queued"
    assert not fake.calls
    fake.now += 10
    fake.jobs = {"7": "PENDING"}
    assert read_record(folder).status == "queued"
    assert fake.calls == ["squeue"]


@pytest.mark.parametrize("state", ["PENDING", "FAILED", "NODE_FAIL"])
def test_a_run_that_has_started_since_the_answer_is_running(
    tmp_path: Path, fake: FakeSlurm, state: str
) -> None:
    folder = submitted(tmp_path, fake, ago=500, verdict="stopped")
    fake.jobs = {"7": state}
    read_record(folder)
    fake.now += 10
    read_record(folder)  # an end is certain by now
    fake.now += 10
    folder.job_start("7-1").path.mkdir()
    (folder.claims / "2").symlink_to("7-1")
    put_time(folder.claims / "2", fake.now - 1)
    assert read_record(folder).status == "running"


def test_a_clock_that_is_ahead_does_not_make_old_starts_new(
    tmp_path: Path, fake: FakeSlurm
) -> None:
    folder = submitted(tmp_path, fake, ago=-300)
    fake.jobs = {"7": "PENDING"}
    assert read_record(folder).status == "queued"


def test_a_verdict_makes_the_next_look_fresh_but_not_every_look(
    tmp_path: Path, fake: FakeSlurm
) -> None:
    folder = submitted(tmp_path, fake, ago=500)
    fake.jobs = {"7": "RUNNING"}
    assert read_record(folder).status == "running"
    fake.now += 5
    folder.job_start("7-0").verdict.write_text("done\n")
    put_time(folder.job_start("7-0").verdict, fake.now)
    fake.jobs = {"7": "COMPLETING"}
    assert read_record(folder).status == "ending"
    assert len(fake.calls) == 2
    for _ in range(600):  # its node hangs
        fake.now += 1
        read_record(folder)
    assert len(fake.calls) < 2 + 600 / 60 + 10
    fake.jobs = {}
    fake.now += 60
    assert read_record(folder).status == "done"
    assert not [call for call in fake.calls if call.startswith("sacct")]


def test_finished_and_local_runs_need_no_question(tmp_path: Path, fake: FakeSlurm) -> None:
    done = submitted(tmp_path, fake, ago=5000, job="7", verdict="done")
    failed = submitted(tmp_path, fake, ago=5000, job="8", verdict="failed")
    for folder in (done, failed):
        put_time(next(folder.path.glob("job-starts/*/verdict")), fake.now - 1000)
    local = make_run(tmp_path / "scratch", "20260101-000000-bbbb", job=None, verdict="done")
    assert [record.status for record in read_records([done, failed, local])] == [
        "done",
        "failed",
        "done",
    ]
    assert not fake.calls
    (failed.job_start("8-0").path / "requeue").touch()
    fake.jobs = {"7": "RUNNING", "8": "PENDING"}
    statuses = [record.status for record in read_records([done, failed, local])]
    assert statuses == ["done", "queued", "done"], (
        "one goes back to the queue; another's job has the id of a done one"
    )


def test_many_processes_at_once_make_one_call(tmp_path: Path) -> None:
    put_command(
        tmp_path,
        "squeue",
        f"echo x >>{tmp_path}/calls; sleep 0.5; printf '7\\037RUNNING\\037\\037n1\\037\\0371:00\\n'",
    )
    code = (
        "import os; from paceline.watch.scheduler import query_states\n"
        "pids = [os.fork() or os._exit(query_states(['7'])['7'].label != 'running') for _ in range(30)]\n"
        "print([os.waitpid(pid, 0)[1] for pid in pids].count(0))"
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, text=True, capture_output=True)
    assert done.stdout == "30\n", done.stderr
    assert (tmp_path / "calls").read_text() == "x\n"


def test_a_broken_or_foreign_file_is_an_empty_answer(tmp_path: Path) -> None:
    file = AnswerCache(tmp_path / "slurm-x.json")
    for text in ("", "{", "[]", '{"asked": "x"}', '{"jobs": 3}'):
        file.path.write_text(text)
        assert file.read() == Answer()
    file.path.unlink()
    file.path.symlink_to("/etc/passwd")
    assert file.read() == Answer()
    answer = Answer(
        5.0,
        {"7": JobState("7", "RUNNING", "r", "n1", "s", "1:00")},
        {"5": (4.0, JobState("5", "FAILED", exit_code="1:0")), "4": (3.0, None)},
        2,
        "no",
        "hint",
    )
    file.write(answer)
    assert file.read() == answer
    assert not file.path.is_symlink()
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_jobs_of_a_sandbox_that_was_started_again_are_not_mistaken_for_older_ones(
    fake: FakeSlurm,
) -> None:
    fake.ended = {"7": "FAILED"}
    assert query_states(["7"])["7"].label == "failed"
    fake.jobs = {"7": "RUNNING"}
    fake.now += 100
    assert query_states(["7"])["7"].label == "running"
    fake.jobs, fake.ended = {}, {"7": "COMPLETED"}
    fake.now += 100
    assert query_states(["7"])["7"].label == "done"


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 60), ("0.5", 0.5), ("0", 0), ("2m", 120), ("90s", 90)]
)
def test_the_interval_is_a_setting(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_POLL_INTERVAL", text)
        assert poll_interval() == seconds


def test_a_sandbox_is_asked_more_often_and_leaves_no_variable_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poll-interval").write_text("0.5\n")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        assert poll_interval() == 0.5
        patch.setenv("PACELINE_POLL_INTERVAL", "30")
        assert poll_interval() == 30
        patch.delenv("PACELINE_POLL_INTERVAL")
        patch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
        assert poll_interval() == 60


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "often"])
def test_a_wrong_interval_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_POLL_INTERVAL", text)
        with pytest.raises(UsageError, match="PACELINE_POLL_INTERVAL"):
            poll_interval()


def test_without_an_interval_every_look_asks(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.jobs = {"7": "RUNNING"}
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_POLL_INTERVAL", "0")
        for _ in range(3):
            query_states(["7", "8"])
    assert fake.calls == ["squeue", "sacct 8"] * 3


def test_the_name_of_the_cluster_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles need it in every command, such as a `ps` in a loop."""
    put_command(tmp_path, "sbatch", "exit 9")
    put_command(tmp_path, "squeue", "exit 9")
    put_command(tmp_path, "scontrol", f"echo x >>{tmp_path}/calls; cat {tmp_path}/answer")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert slurm.cluster_name() is None, "nothing to remember"
        (tmp_path / "answer").write_text("ClusterName             = east\n")
        assert [slurm.cluster_name() for _ in range(3)] == ["east"] * 3
        assert (tmp_path / "calls").read_text() == "x\nx\n"
        patch.setenv("SLURM_CONF", str(tmp_path / "answer"))
        (tmp_path / "answer").write_text("ClusterName             = west\n")
        assert slurm.cluster_name() == "west", "another Slurm has another name"
