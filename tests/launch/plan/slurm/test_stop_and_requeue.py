"""stop_and_requeue.sh alone, with fake Slurm commands; tests/slurm/test_requeue.py uses the real ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from paceline.contract.claims import find_holder, find_successor
from paceline.contract.run_folder import RunFolder
from paceline.slurm import batch_script
from paceline.slurm.commands import known_jobs

LIBRARY = Path(batch_script.__file__).with_name("stop_and_requeue.sh")

# The agents: srun does what the test wrote to the file `agents`, in the folder of the job start.
SRUN = """\
echo "$*" >>"$CALLS/srun"
echo "$PACELINE_RENDEZVOUS" >>"$CALLS/rendezvous"
cd "$PACELINE_RUN/job-starts/$PACELINE_JOB_START" || exit
: >started
source "$CALLS/agents"
"""
# The controller: requeueing fails as often as the file `refusals` has lines. A requeued job is ended with TERM.
SCONTROL = """\
echo "$*" >>"$CALLS/scontrol"
[ "$1" != --all ] || shift
case $1 in
    show) cat "$CALLS/shown" 2>/dev/null ;;
    requeue)
        if [ -s "$CALLS/refusals" ]; then
            head -n 1 "$CALLS/refusals" >&2
            sed -i 1d "$CALLS/refusals"
            exit 1
        fi
        kill -TERM "$PPID"
        ;;
esac
"""
COMMANDS = {
    "srun": SRUN,
    "mpirun": SRUN + ': mpirun "$@"\n',
    "scontrol": SCONTROL,
    "squeue": 'cat "$CALLS/live" 2>/dev/null',
    "sbatch": 'echo "$*" >>"${0%/*}/../calls/sbatch"; echo "78;north"',
    "sleep": 'echo "$*" >>"$CALLS/sleep"; [ "${1%%.*}" -ge 1 ] || /bin/sleep "$1"',
}

SINGLE = """\
paceline_run=$RUN
source "$LIBRARY"
paceline_start_job {options}
{setup}
paceline_open_rendezvous
paceline_launch {launcher} --nodes=1 agent
paceline_finish_job
"""
TASK = """\
source "$LIBRARY"
paceline_start_task "$RUN" "$RUN/submission" tasks-1 {options}
{setup}
paceline_run_half() {{ echo "$*" >>"$CALLS/run_half"; }}
paceline_launch_trial() {{ paceline_open_rendezvous "$paceline_trial"; paceline_launch {launcher} --nodes=1 agent; }}
paceline_run_trials {slots}
paceline_finish_task
"""

AFTER_A_REQUEUE = ["1", "2", "5", "10", "20", "20"]  # seconds between two looks at the job

DONE = "echo done >verdict"
FAILED = "echo failed >verdict; exit 1"
STOPPED = "echo >requeue; echo stopped >verdict"
UNFIT = "echo n2,n3 >requeue; echo failed >verdict"
WAITS = f"until [ -e stop ]; do /bin/sleep 0.02; done; {STOPPED}"


class Bench:
    """A run folder (or a sweep's), the commands, and a script that sources the library."""

    def __init__(self, folder: Path) -> None:
        self.run, self.calls, self.bin = folder / "run", folder / "calls", folder / "bin"
        for path in (self.run, self.calls, self.bin):
            path.mkdir()
        for name, text in COMMANDS.items():
            self.put(name, text)

    def put(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def claim(self, job_start: str) -> None:
        (self.run / "claims").mkdir(exist_ok=True)
        (self.run / "claims" / str(len(self.claims()) + 1)).symlink_to(job_start)

    def claims(self) -> list[str]:
        """Return the job starts that have had the run folder, in turn."""
        links = sorted((self.run / "claims").iterdir(), key=lambda path: int(path.name))
        return [os.readlink(path) for path in links]

    def start(
        self,
        agents: str,
        text: str = SINGLE,
        *,
        options: str = "",
        launcher: str = "srun",
        slots: int = 1,
        setup: str = "",
        **environ: str,
    ) -> subprocess.Popen[str]:
        (self.calls / "agents").write_text(agents)
        (self.run / "job.sbatch").write_text(
            text.format(options=options, launcher=launcher, slots=slots, setup=setup)
        )
        return self.start_script(**environ)

    def start_script(self, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/bash", str(self.run / "job.sbatch")],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "HOME": "/",
                "RUN": str(self.run),
                "CALLS": str(self.calls),
                "LIBRARY": str(LIBRARY),
                "SLURM_JOB_ID": "7",
                **environ,
            },
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def carry_out(self, agents: str, text: str = SINGLE, **options: str) -> tuple[int, str]:
        return self.finish(self.start(agents, text, **options))  # type: ignore[arg-type]

    def calls_of(self, name: str) -> list[str]:
        path = self.calls / name
        return path.read_text().splitlines() if path.exists() else []

    def requeues(self) -> list[str]:
        return [call for call in self.calls_of("scontrol") if "show" not in call]

    def path_without(self, *names: str) -> str:
        """Return a PATH that has no such command of Slurm, and little else."""
        for name in names:
            (self.bin / name).unlink()
        for name in (
            "bash",
            "cat",
            "env",
            "grep",
            "ln",
            "mkdir",
            "od",
            "paste",
            "readlink",
            "rm",
            "sed",
            "sort",
            "tail",
            "timeout",
            "tr",
            "uname",
        ):
            (self.bin / name).symlink_to(shutil.which(name) or name)
        return str(self.bin)

    def forbid_requeue(self, requeue: int = 0, name: str = "train") -> None:
        """Answer as `scontrol show job` does for a job that may not be requeued."""
        lines = [
            f"JobId=7 JobName={name}",
            f"   Requeue={requeue} Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0",
        ]
        (self.calls / "shown").write_text("\n".join(lines) + "\n")

    def until(self, path: Path) -> None:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} never appears"
            time.sleep(0.02)

    def trials(self, line: str, *numbers: int) -> None:
        """Write down which trials task 3 runs, as a sweep does."""
        (self.run / "submission" / "logs").mkdir(parents=True)
        (self.run / "submission" / "tasks-1").write_text(f"2 9\n3 {line}\n")
        for number in numbers:
            (self.run / "trials" / str(number)).mkdir(parents=True)


TASK_3 = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_passes() -> None:
    done = subprocess.run(["shellcheck", str(LIBRARY)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


UNSAVED = f"echo 'step 7' >unsaved; {DONE}"


@pytest.mark.parametrize(
    ("agents", "code", "verdict"),
    [(DONE, 0, "done"), (FAILED, 1, "failed"), ("exit 0", 1, "failed"), (UNSAVED, 1, "done")],
    ids=["done", "failed", "no verdict", "done, not saved"],
)
def test_a_finished_run_does_not_run_again(
    bench: Bench, agents: str, code: int, verdict: str
) -> None:
    assert bench.carry_out(agents) == (code, f"paceline: job 7: {verdict}\n")
    assert bench.calls_of("srun") == ["--nodes=1 agent"]
    assert bench.requeues() == []
    assert (bench.run / "job").read_text() == "7\n"


def test_a_killed_head_agent_is_started_again(bench: Bench) -> None:
    killed = 'echo $(($(cat agent 2>/dev/null) + 1)) >agent; touch join-error-1; [ "$(cat agent)" = 3 ] || kill -9 $$\n'
    first = "if [ -e seen ]; then [ ! -e join-error-1 ] || exit; fi; : >seen\n"
    code, out = bench.carry_out(first + killed + DONE)
    assert (code, out.count("an agent was killed; starting the agents again")) == (0, 2)
    assert len(bench.calls_of("srun")) == 3


def test_agents_are_started_again_if_srun_cannot_reach_a_node(bench: Bench) -> None:
    """Then srun kills the head agent while it waits for the others."""
    code, out = bench.carry_out(
        f": >head; [ -e third ] || {{ mv second third || : >second; exit 1; }}; {DONE}"
    )
    assert (code, out.splitlines()[-1]) == (0, "paceline: job 7: done")
    assert (len(bench.calls_of("srun")), bench.calls_of("sleep")) == (3, ["0", "2"])


def test_progress_between_killed_agents_allows_more_of_them(bench: Bench) -> None:
    agents = """
n=$(cat agent 2>/dev/null || echo 0)
echo $((n + 1)) >agent
if [ "$n" = 25 ]; then echo done >verdict; exit; fi
mkdir -p "$PACELINE_RUN/checkpoints/step-$n"
: >"$PACELINE_RUN/checkpoints/step-$n/complete.json"
"""
    code, out = bench.carry_out(agents)
    assert (code, out.splitlines()[-1]) == (0, "paceline: job 7: done")
    assert len(bench.calls_of("srun")) == 26
    assert set(bench.calls_of("sleep")) == {"0"}
    assert len(set(bench.calls_of("rendezvous"))) == 26


def test_a_head_agent_that_is_killed_at_once_is_started_again(bench: Bench) -> None:
    """Before it can leave a sign that it began."""
    assert bench.carry_out(f"[ -e second ] || {{ : >second; kill -9 $$; }}; {DONE}")[0] == 0
    assert len(bench.calls_of("srun")) == 2


def test_a_head_agent_that_is_always_killed_at_once_ends_the_run(bench: Bench) -> None:
    assert bench.carry_out("kill -9 $$")[0] == 1
    assert len(bench.calls_of("srun")) == 4


def test_srun_does_not_wait_for_a_lost_node_for_ever(bench: Bench) -> None:
    code, out = bench.carry_out(
        f"{STOPPED}; : >node-lost; exec /bin/sleep 600", setup="paceline_poll=0.05"
    )
    assert (code, out.splitlines()[-1]) == (75, "paceline: job 7: stopped")
    assert bench.requeues() == ["requeue 7"]


@pytest.mark.parametrize("requeue", [True, False])
def test_a_job_whose_srun_waits_for_the_node_of_a_killed_agent_goes_back_into_the_queue(
    bench: Bench, requeue: bool
) -> None:
    """Its step keeps the cores of the nodes, so that another one would wait for them."""
    agents = "echo 1 >agent; : >node-lost; exec /bin/sleep 600"
    code, out = bench.carry_out(
        agents, setup="paceline_poll=0.05", options="" if requeue else "--no-requeue"
    )
    assert "srun waited for a node that is not responding" in out
    assert (code, bench.requeues()) == ((75, ["requeue 7"]) if requeue else (1, []))
    job_start = bench.run / "job-starts" / "7-0"
    assert (job_start / "verdict").read_text() == ("stopped\n" if requeue else "failed\n")
    assert (job_start / "requeue").exists() is requeue
    assert len(bench.calls_of("srun")) == 1


def test_agents_that_start_again_have_their_minute_anew(bench: Bench) -> None:
    agents = f"[ -e second ] && {{ [ ! -e node-lost ] && {DONE}; exit; }}; : >second; echo 1 >agent; : >node-lost; exit 76"
    assert bench.carry_out(agents)[0] == 0
    assert len(bench.calls_of("srun")) == 2


def test_nothing_of_the_batch_script_outlives_its_shell(bench: Bench) -> None:
    """Slurm may not find a subshell of a shell that was killed."""
    process = bench.start("exec /bin/sleep 600", setup="paceline_poll=0.05")
    bench.until(bench.run / "job-starts" / "7-0" / "started")
    shell = psutil.Process(process.pid)
    (watcher,) = [child for child in shell.children() if child.cmdline() == shell.cmdline()]
    agents = [child for child in shell.children() if child != watcher]
    process.kill()
    process.wait()
    for agent in agents:
        agent.kill()
    assert psutil.wait_procs([watcher], timeout=60)[1] == []
    bench.finish(process)


@pytest.mark.parametrize("agents", ["exit 1", ": >head; exit 1"])
def test_a_run_whose_agents_leave_no_verdict_says_so(bench: Bench, agents: str) -> None:
    assert bench.carry_out(agents)[0] == 1
    assert len(bench.calls_of("srun")) == (20 if "head" in agents else 1)
    problem = (bench.run / "job-starts" / "7-0" / "requeue-failed").read_text()
    assert problem == f"the agents ended without a verdict; {bench.run}/slurm.log says why\n"


@pytest.mark.parametrize("why", ["a verdict", "cancelled", "no agent", "terminated"])
def test_agents_that_were_not_killed_are_not_started_again(bench: Bench, why: str) -> None:
    agents = {
        "a verdict": f"echo 1 >agent; {FAILED}",
        "cancelled": 'echo 1 >agent; : >"$PACELINE_RUN/cancelled"; exit 1',
        "no agent": "exit 1",
        "terminated": "echo 1 >agent; kill -TERM $PPID; /bin/sleep 0.2; exit 1",
    }
    assert bench.carry_out(agents[why])[0] == 1
    assert len(bench.calls_of("srun")) == 1


def test_a_stopped_run_is_requeued(bench: Bench) -> None:
    code, out = bench.carry_out(STOPPED)
    assert (code, out) == (75, "paceline: job 7: stopped\n"), (
        "TERM of the requeue does not end the script early"
    )
    assert bench.requeues() == ["requeue 7"]
    assert bench.calls_of("sleep") == AFTER_A_REQUEUE


def test_a_requeue_that_the_controller_forgets_is_repeated(bench: Bench) -> None:
    """It has crashed, and the job is running again."""
    (bench.calls / "shown").write_text("   JobState=RUNNING Reason=None\n")
    bench.put(
        "scontrol",
        SCONTROL.replace(
            "kill -TERM",
            '[ ! -e "$CALLS/once" ] || : >"$CALLS/shown"; : >"$CALLS/once"; kill -TERM',
        ),
    )
    assert bench.carry_out(UNFIT)[0] == 1
    assert bench.requeues() == ["requeue 7", "update jobid=7 ExcNodeList=n2,n3"] * 2


def test_a_stop_without_a_requeue_request_is_final(bench: Bench) -> None:
    assert bench.carry_out("echo stopped >verdict")[0] == 75
    assert bench.requeues() == []


def test_usr1_becomes_the_file_stop(bench: Bench) -> None:
    process = bench.start(WAITS)
    bench.until(bench.run / "job-starts" / "7-0" / "started")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process) == (75, "paceline: job 7: stopped\n")
    assert bench.requeues() == ["requeue 7"]


def test_a_file_of_the_user_does_not_keep_a_run_from_stopping(bench: Bench) -> None:
    bench.forbid_requeue()  # another job continues
    (bench.run / "result.json").touch()  # as the result of a trial is called
    process = bench.start(WAITS)
    bench.until(bench.run / "job-starts" / "7-0" / "started")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process)[0] == 75
    assert (bench.run / "job").read_text() == "78\n"


def test_after_term_nothing_is_requeued(bench: Bench) -> None:
    process = bench.start("until [ -e over ]; do /bin/sleep 0.02; done; " + STOPPED)
    start = bench.run / "job-starts" / "7-0"
    bench.until(start / "started")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None, "it waits for the agents, which save"
    (start / "over").touch()
    assert bench.finish(process)[0] == 75
    assert (start / "requeue").exists()
    assert bench.requeues() == []


TRAPS = "trap 'echo cleanup' EXIT TERM USR1 CONT"


@pytest.mark.parametrize("name", ["USR1", "CONT"])
def test_traps_of_the_user_do_not_keep_a_job_from_stopping(bench: Bench, name: str) -> None:
    """Nor does a trap that ends `wait` start the agents a second time."""
    process = bench.start(f"echo 1 >agent; {WAITS}", setup=TRAPS)
    start = bench.run / "job-starts" / "7-0"
    bench.until(start / "agent")
    process.send_signal(signal.Signals[f"SIG{name}"])
    if name == "CONT":
        assert process.stdout is not None
        assert process.stdout.readline() == "cleanup\n"
        process.send_signal(signal.SIGUSR1)
    assert bench.finish(process) == (75, "paceline: job 7: stopped\ncleanup\n"), (
        "the trap for EXIT is theirs"
    )
    assert (start / "stop").exists()
    assert (len(bench.calls_of("srun")), bench.requeues()) == (1, ["requeue 7"])


def test_traps_of_the_user_do_not_bring_a_cancelled_job_back(bench: Bench) -> None:
    process = bench.start("until [ -e over ]; do /bin/sleep 0.02; done; " + STOPPED, setup=TRAPS)
    start = bench.run / "job-starts" / "7-0"
    bench.until(start / "started")
    process.send_signal(signal.SIGTERM)
    (start / "over").touch()
    assert bench.finish(process) == (75, "paceline: job 7: stopped\ncleanup\n")
    assert bench.requeues() == []


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_traps_of_the_user_do_not_disarm_a_task(bench: Bench, name: str, slots: int) -> None:
    bench.trials("0 1", 0, 1)
    agents = f"until [ -e stop ] || [ -e over ]; do /bin/sleep 0.02; done; {STOPPED}"
    process = bench.start(agents, TASK, slots=slots, setup=TRAPS, **TASK_3)
    starts = [bench.run / "trials" / str(trial) / "job-starts" / "5_3-0" for trial in range(slots)]
    for start in starts:
        bench.until(start / "started")
    process.send_signal(signal.Signals[f"SIG{name}"])
    if name == "TERM":
        for start in starts:
            (start / "over").touch()
    assert bench.finish(process) == (75, "cleanup\n")
    assert bench.requeues() == (["requeue 5_3"] if name == "USR1" else [])
    assert len(bench.calls_of("srun")) == slots


def test_term_before_the_agents_start_starts_none(bench: Bench) -> None:
    code, out = bench.carry_out(DONE, setup="kill -TERM $$")
    assert (code, bench.calls_of("srun")) == (1, [])
    assert "ended before its agents started" in out


def test_term_reaches_mpirun_itself(bench: Bench) -> None:
    process = bench.start(
        f"trap '{STOPPED}; exit' TERM; while :; do /bin/sleep 0.02; done", launcher="mpirun"
    )
    bench.until(bench.run / "job-starts" / "7-0" / "started")
    process.send_signal(signal.SIGTERM)
    assert bench.finish(process)[0] == 75
    assert bench.requeues() == []


def test_a_cancelled_run_is_not_requeued_and_does_not_start(bench: Bench) -> None:
    assert bench.carry_out(f"{STOPPED}; : >../../cancelled")[0] == 75
    assert bench.requeues() == []
    code, out = bench.carry_out(DONE, SLURM_JOB_ID="8")
    assert (code, len(bench.calls_of("srun"))) == (1, 1)
    assert "This run was cancelled." in out


def test_the_agent_decides_and_the_shell_obeys(bench: Bench) -> None:
    """Without --no-requeue, too; the shell adds only that somebody may have added the option to the script."""
    assert bench.carry_out("echo stopped >verdict")[0] == 75
    assert bench.carry_out(STOPPED, options="--no-requeue", SLURM_JOB_ID="8")[0] == 75
    assert bench.requeues() == []
    assert bench.carry_out(STOPPED, SLURM_JOB_ID="9")[0] == 75
    assert bench.requeues() == ["requeue 9"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("   SubmitTime=2026-11-17T12:00:10 EligibleTime=Unknown", "1794916810\n"),
        ("   SubmitTime=Unknown", None),
        ("", None),
    ],
)
def test_the_agents_learn_since_when_the_job_was_queued(
    bench: Bench, line: str, expected: str | None
) -> None:
    (bench.calls / "shown").write_text(
        f"JobId=7 JobName=SubmitTime=1\n{line}\n   Requeue=1 Restarts=0\n"
    )
    assert bench.carry_out(DONE, TZ="UTC")[0] == 0
    told = bench.run / "job-starts" / "7-0" / "queued-at"
    assert (told.read_text() if told.exists() else None) == expected


def test_an_unreachable_controller_is_retried(bench: Bench) -> None:
    (bench.calls / "refusals").write_text("no\nno\n")
    bench.carry_out(STOPPED)
    assert bench.requeues() == ["requeue 7"] * 3
    assert bench.calls_of("sleep") == AFTER_A_REQUEUE


def test_retries_of_an_unreachable_controller_end(bench: Bench) -> None:
    (bench.calls / "refusals").write_text("no\n" * 9)
    assert bench.carry_out(STOPPED)[0] == 75
    assert len(bench.requeues()) == 6


@pytest.mark.parametrize(
    ("options", "nodes"), [("", "n2,n3"), ("'--exclude=gpu[7-9,11]'", "gpu[7-9,11],n2,n3")]
)
def test_nodes_are_excluded_after_the_requeue(bench: Bench, options: str, nodes: str) -> None:
    assert bench.carry_out(UNFIT, options=options)[0] == 1
    assert bench.requeues() == ["requeue 7", f"update jobid=7 ExcNodeList={nodes}"]


def test_exclusions_of_the_user_stay_if_agents_exclude_nothing(bench: Bench) -> None:
    bench.carry_out(STOPPED, options="--exclude=n1")
    assert bench.requeues() == ["requeue 7"]


def test_a_task_of_an_array_is_requeued_alone(bench: Bench) -> None:
    code, out = bench.carry_out(UNFIT, **TASK_3)
    assert (code, out) == (1, "paceline: job 5_3: failed\n")
    assert bench.requeues() == ["requeue 5_3", "update jobid=5_3 ExcNodeList=n2,n3"]
    assert (bench.run / "job-starts" / "5_3-0" / "verdict").exists()


@pytest.mark.parametrize(("agents", "exclude"), [(STOPPED, ""), (UNFIT, "--exclude=n2,n3 ")])
def test_if_requeueing_is_forbidden_another_job_continues(
    bench: Bench, agents: str, exclude: str
) -> None:
    bench.forbid_requeue()
    bench.carry_out(agents)
    assert bench.requeues() == []
    assert bench.calls_of("sbatch") == [
        f"--parsable --dependency=afterany:7 {exclude}{bench.run}/job.sbatch"
    ]
    assert (bench.run / "job").read_text() == "78\n"


def test_a_job_name_cannot_forbid_a_requeue(bench: Bench) -> None:
    bench.forbid_requeue(1, name="Requeue=0 Restarts=")
    assert bench.carry_out(STOPPED)[0] == 75
    assert (bench.requeues(), bench.calls_of("sbatch")) == (["requeue 7"], [])


def test_without_scontrol_another_job_continues(bench: Bench) -> None:
    path = bench.path_without("scontrol")
    assert bench.carry_out(STOPPED, PATH=path) == (75, "paceline: job 7: stopped\n")
    assert bench.calls_of("sbatch") == [
        f"--parsable --dependency=afterany:7 {bench.run}/job.sbatch"
    ]
    assert (bench.run / "job").read_text() == "78\n"


@pytest.mark.parametrize(
    ("reason", "sbatch"),
    [
        ("scontrol: error: Access/permission denied for job 7", True),
        ("Requested operation not supported on this system", True),
        # it is being preempted: Slurm has requeued it
        ("Job is pending execution for job 7", False),
    ],
)
def test_what_a_refused_requeue_leads_to(bench: Bench, reason: str, sbatch: bool) -> None:
    (bench.calls / "refusals").write_text(f"{reason}\n" * 5)
    assert bench.carry_out(STOPPED)[0] == 75
    assert (bench.requeues(), bool(bench.calls_of("sbatch"))) == (["requeue 7"], sbatch)
    assert not (bench.run / "job-starts" / "7-0" / "requeue-failed").exists()


def test_nodes_are_excluded_after_a_requeue_that_was_not_confirmed(bench: Bench) -> None:
    (bench.calls / "refusals").write_text(
        "Socket timed out on send/recv operation\nJob is pending execution for job 7\n"
    )
    assert bench.carry_out(UNFIT)[0] == 1
    assert bench.requeues() == ["requeue 7", "requeue 7", "update jobid=7 ExcNodeList=n2,n3"]
    assert not (bench.run / "job-starts" / "7-0" / "requeue-failed").exists()


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (
            {"scontrol": "echo Unable to contact slurm controller >&2; exit 1"},
            "Unable to contact slurm controller",
        ),
        (
            {"scontrol": None, "sbatch": "echo error: no; echo account >&2; exit 1"},
            "error: no account",
        ),
        ({"scontrol": None, "sbatch": None}, "sbatch: not found"),
    ],
    ids=["controller", "sbatch", "neither"],
)
def test_a_failed_requeue_is_written_down(
    bench: Bench, commands: dict[str, str | None], reason: str
) -> None:
    path = bench.path_without(*commands)
    for name, text in commands.items():
        if text is not None:
            bench.put(name, text)
    code, out = bench.carry_out(STOPPED, PATH=path)
    assert code == 75
    assert "error: Cannot requeue this run" in out
    assert reason in (bench.run / "job-starts" / "7-0" / "requeue-failed").read_text()
    assert (bench.run / "job").read_text() == "7\n"


def test_a_continuation_that_slurm_has_after_all_is_adopted(bench: Bench) -> None:
    bench.forbid_requeue()
    bench.put("sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    (bench.calls / "live").write_text(
        "70 afterany:77(unfulfilled)\n79 afterany:7(unfulfilled)\n80 (null)\n"
    )
    assert bench.carry_out(STOPPED)[0] == 75
    assert (bench.run / "job").read_text() == "79\n"
    assert not (bench.run / "job-starts" / "7-0" / "requeue-failed").exists()


def test_an_array_whose_submission_was_not_confirmed_runs_nothing(bench: Bench) -> None:
    bench.trials("0", 0)
    (bench.run / "submission" / "cancelled-tasks-1").touch()
    code, out = bench.carry_out(DONE, TASK, **TASK_3)
    assert (code, bench.calls_of("srun")) == (1, [])
    assert "was not confirmed" in out


def test_trials_say_that_their_task_was_not_requeued(bench: Bench) -> None:
    bench.trials("0 1", 0, 1)
    (bench.calls / "refusals").write_text("no\n" * 9)
    agents = f"case $PACELINE_RUN in */0) {STOPPED} ;; *) {DONE} ;; esac"
    assert bench.carry_out(agents, TASK, **TASK_3)[0] == 75
    failed = [path.parts[-4] for path in bench.run.glob("trials/*/job-starts/*/requeue-failed")]
    assert failed == ["0"]


def test_variables_of_the_user_do_not_change_what_slurm_has_set(bench: Bench) -> None:
    setup = (
        "export HOSTNAME=elsewhere SLURM_JOB_ID=1 SLURM_RESTART_COUNT=9 SLURM_ARRAY_TASK_ID=5 SLURM_ARRAY_JOB_ID=1\n"
        "export PATH=/nowhere IFS=x"
    )
    assert bench.carry_out(STOPPED, setup=setup) == (75, "paceline: job 7: stopped\n")
    assert bench.requeues() == ["requeue 7"]
    (address,) = bench.calls_of("rendezvous")
    assert address == f"{os.uname().nodename}:{20000 + 7 * 31}"


def test_a_job_that_was_done_does_not_run_again(bench: Bench) -> None:
    bench.carry_out(DONE)
    code, out = bench.carry_out(FAILED, SLURM_RESTART_COUNT="1")
    assert (code, out) == (0, "paceline: job 7: already done\n")
    assert len(bench.calls_of("srun")) == 1


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_job_ids_that_start_over_do_not_end_a_run(bench: Bench, restarts: str) -> None:
    """An earlier job had the same id, and was done. `paceline submit --resume` has asked for more."""
    bench.carry_out(DONE)
    assert bench.carry_out(STOPPED)[0] == 75
    assert bench.carry_out(FAILED, SLURM_RESTART_COUNT=restarts)[0] == 1
    assert bench.claims() == ["7-0", "7-0_2", "7-0_3" if restarts == "0" else "7-1"]


def test_a_script_that_is_not_submitted_says_how_to_submit_it(bench: Bench) -> None:
    code, out = bench.carry_out(DONE, SLURM_JOB_ID="")
    script = bench.run / "job.sbatch"
    assert (code, out) == (
        1,
        f"paceline: error: This is a batch script for Slurm. Submit it: sbatch {script}\n",
    )
    assert list(bench.run.iterdir()) == [script]


@pytest.mark.parametrize("job", ["", "7"])
def test_an_array_that_is_submitted_without_tasks_says_how_to_submit_it(
    bench: Bench, job: str
) -> None:
    bench.trials("0", 0)
    submission = bench.run / "submission"
    code, out = bench.carry_out(DONE, TASK, SLURM_JOB_ID=job)
    assert code == 1
    assert f"sbatch --array=TASKS {submission}/job.sbatch tasks-1" in out
    assert not (submission / "job-starts").exists()


HANGS = SCONTROL.replace("show)", "show) exec /bin/sleep 600;;\n    none)")


@pytest.mark.parametrize("text", [SINGLE, TASK], ids=["single", "task"])
def test_a_controller_that_does_not_answer_does_not_keep_a_job_from_starting(
    bench: Bench, text: str
) -> None:
    """Nor from stopping in time, if it hangs until then."""
    bench.trials("0", 0)
    bench.put("scontrol", HANGS)
    environ = TASK_3 if text == TASK else {}
    process = bench.start(WAITS, text, paceline_patience="0.5", **environ)
    bench.until(bench.calls / "scontrol")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process)[0] == 75
    assert bench.requeues() == ["requeue 5_3" if text == TASK else "requeue 7"]


def test_squeue_that_does_not_answer_does_not_keep_a_job_from_starting(bench: Bench) -> None:
    bench.claim("6-2")
    (bench.run / "job-starts" / "6-2").mkdir(parents=True)
    (bench.run / "job-starts" / "6-2" / "verdict").write_text("stopped\n")
    bench.put("squeue", "exec /bin/sleep 600")
    assert bench.carry_out(DONE, paceline_patience="0.2")[0] == 0


def test_a_format_of_times_that_the_user_has_set_does_not_matter(bench: Bench) -> None:
    bench.put(
        "scontrol",
        'echo "   SubmitTime=${SLURM_TIME_FORMAT/standard/2026-11-17T12:00:10} EligibleTime=Unknown"',
    )
    assert bench.carry_out(DONE, TZ="UTC", SLURM_TIME_FORMAT="relative")[0] == 0
    assert (bench.run / "job-starts" / "7-0" / "queued-at").read_text() == "1794916810\n"


def test_a_continuation_gets_the_token_of_the_user_and_nobody_else_sees_it(bench: Bench) -> None:
    bench.forbid_requeue()
    seen = bench.calls / "seen"
    bench.put("sbatch", f'export -p >{seen}; echo "78;north"')
    bench.put("env", 'echo "$*" >>"$CALLS/env"; exec /usr/bin/env "$@"')
    variables = {
        "SLURM_JWT": "secret-token",
        "SLURM_CONF": "/etc/c",
        "LC_ALL": "C",
        "OTHER": "mine",
    }
    assert bench.carry_out(STOPPED, **variables)[0] == 75
    text = seen.read_text()
    assert ("OTHER" in text, "SLURM_JOB_ID" in text) == (False, False)
    assert 'SLURM_JWT="secret-token"' in text
    assert "SLURM_CONF=/etc/c" in bench.calls_of("env")[0]
    assert "secret-token" not in bench.calls_of("env")[0]


def test_a_port_that_is_taken_is_left_to_the_head_agent(bench: Bench) -> None:
    """It chooses another. To connect could take minutes: nobody may be accepting there."""
    with socket.socket() as listener:
        for job in range(1, 300):
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", 20000 + job * 31))
                break
        listener.listen()
        listener.setblocking(False)
        assert bench.carry_out(DONE, SLURM_JOB_ID=str(job))[0] == 0
        assert bench.calls_of("rendezvous") == [f"{os.uname().nodename}:{20000 + job * 31}"]
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("RUNNING", 1),
        ("SUSPENDED", 1),
        ("COMPLETING", 1),
        ("COMPLETED", 0),
        ("PENDING", 0),
        ("", 0),
        ("UNHEARD_OF", 1),
        ("COMPLETED\nRUNNING", 1),
    ],
)
def test_one_live_job_per_run_folder(bench: Bench, state: str, code: int) -> None:
    bench.claim("6-2")
    (bench.run / "job").write_text("6\n")
    (bench.calls / "live").write_text(state)
    found, out = bench.carry_out(DONE)
    assert (found, (bench.run / "job").read_text()) == (code, "6\n" if code else "7\n")
    assert ("This run is already running as job 6." in out) == bool(code)
    assert bench.claims() == (["6-2"] if code else ["6-2", "7-0"])


@pytest.mark.parametrize(("state", "code"), [("RUNNING", 1), ("TIMEOUT", 0)])
def test_a_warning_of_squeue_is_not_a_state(bench: Bench, state: str, code: int) -> None:
    bench.claim("6-2")
    bench.put("squeue", f"echo 'squeue: warning: this node is being drained' >&2; echo {state}")
    assert bench.carry_out(DONE)[0] == code
    assert bench.claims() == (["6-2"] if code else ["6-2", "7-0"])


@pytest.mark.parametrize("where", ["submitter", "setup"])
def test_variables_of_the_user_do_not_hide_a_live_job(bench: Bench, where: str) -> None:
    bench.put("squeue", '[ -n "${SQUEUE_PARTITION+set}${SQUEUE_STATES+set}" ] || echo RUNNING')
    if where == "submitter":
        bench.claim("6-2")
        assert bench.carry_out(DONE, SQUEUE_PARTITION="low", SQUEUE_STATES="PD")[0] == 1
        return
    bench.trials("0", 0)
    (bench.run / "trials" / "0" / "claims").mkdir()
    (bench.run / "trials" / "0" / "claims" / "1").symlink_to("6_1-0")
    bench.carry_out(DONE, TASK, setup="set -u; export SQUEUE_PARTITION=low", **TASK_3)
    assert bench.calls_of("srun") == []


def test_a_job_that_is_ending_is_over_with_its_verdict(bench: Bench) -> None:
    bench.claim("6-2")
    (bench.calls / "live").write_text("COMPLETING")
    (bench.run / "job-starts" / "6-2").mkdir(parents=True)
    (bench.run / "job-starts" / "6-2" / "verdict").write_text("failed\n")
    assert bench.carry_out(DONE)[0] == 0


@pytest.mark.parametrize(
    ("squeue", "code"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 0),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", 1),
        ("exit 1", 1),
    ],
    ids=["unknown", "unreachable", "silent"],
)
def test_only_slurm_can_tell_that_another_job_is_gone(bench: Bench, squeue: str, code: int) -> None:
    bench.claim("6-2")
    bench.put("squeue", squeue)
    assert bench.carry_out(DONE)[0] == code
    (bench.run / "job-starts" / "6-2").mkdir(parents=True)
    (bench.run / "job-starts" / "6-2" / "verdict").write_text("stopped\n")
    assert bench.carry_out(DONE, SLURM_JOB_ID="8")[0] == 0, "the verdict of its head agent will do"


def test_a_run_outside_of_slurm_keeps_jobs_out(bench: Bench) -> None:
    start = bench.run / "job-starts" / "pid-12-abc"
    start.mkdir(parents=True)
    (start / "process").touch()
    bench.claim("pid-12-abc")
    code, out = bench.carry_out(DONE)
    assert (code, "running outside Slurm" in out) == (1, True), out
    (start / "verdict").write_text("stopped\n")
    assert bench.carry_out(DONE)[0] == 0


def test_eight_at_once_give_one_trainer(bench: Bench) -> None:
    bench.claim("6-0")  # over: all eight may succeed it
    agents = (
        'echo "$SLURM_JOB_ID" >>"$CALLS/trainers"; until [ -e "$CALLS/go" ]; do /bin/sleep 0.02; done; '
        + DONE
    )
    bench.put("squeue", 'case " $* " in *" --jobs=6 "*) echo COMPLETED ;; *) echo RUNNING ;; esac')
    jobs = [bench.start(agents, SLURM_JOB_ID="11")]
    jobs += [bench.start_script(SLURM_JOB_ID=str(number)) for number in range(12, 19)]
    deadline = time.monotonic() + 60
    while sum(job.poll() is not None for job in jobs) < 7:
        assert time.monotonic() < deadline, "more than one job trains"
        time.sleep(0.02)
    (bench.calls / "go").touch()
    assert sorted(bench.finish(job)[0] for job in jobs) == [0, *[1] * 7]
    (trainer,) = bench.calls_of("trainers")
    assert bench.claims() == ["6-0", f"{trainer}-0"]
    assert (bench.run / "job").read_text() == f"{trainer}\n"


def test_a_requeued_job_succeeds_its_earlier_start(bench: Bench) -> None:
    (bench.calls / "live").write_text("RUNNING")
    assert bench.carry_out(STOPPED)[0] == 75
    assert bench.carry_out(DONE, SLURM_RESTART_COUNT="1")[0] == 0
    assert bench.claims() == ["7-0", "7-1"]


def test_a_job_that_a_crashed_controller_starts_twice(bench: Bench) -> None:
    """The second start has the same restart count. It has the run folder then, and the first one commits no more."""
    first = bench.start(WAITS)
    bench.until(bench.run / "job-starts" / "7-0" / "started")
    second = bench.start_script()
    bench.until(bench.run / "job-starts" / "7-0_2" / "started")
    run = RunFolder(bench.run)
    assert (bench.claims(), find_successor(run, "7-0")) == (["7-0", "7-0_2"], "7-0_2")
    holder = find_holder(run)
    assert holder is not None
    assert holder.job == "7"
    assert known_jobs(run) == ["7"]
    for process in (first, second):
        process.send_signal(signal.SIGUSR1)
        assert bench.finish(process)[0] == 75


def test_a_task_that_a_crashed_controller_starts_twice(bench: Bench) -> None:
    bench.trials("1", 1)
    assert bench.carry_out(FAILED, TASK, **TASK_3)[0] == 1
    assert bench.carry_out(DONE, TASK, **TASK_3)[0] == 0
    assert sorted(path.name for path in (bench.run / "trials" / "1" / "job-starts").iterdir()) == [
        "5_3-0",
        "5_3-0_2",
    ]


def test_a_job_that_may_not_start_leaves_no_job_start(bench: Bench) -> None:
    bench.claim("8-0")
    (bench.calls / "live").write_text("RUNNING\n")
    assert bench.carry_out(DONE)[0] == 1
    assert list((bench.run / "job-starts").iterdir()) == []


def test_a_task_runs_its_trials_and_closes_them(bench: Bench) -> None:
    bench.trials("0 1 4", 0, 1, 4)
    (bench.run / "trials" / "1" / "result.json").touch()
    agents = "case $PACELINE_RUN in */4) echo failed >verdict ;; *) echo done >verdict ;; esac"
    assert bench.carry_out(agents, TASK, **TASK_3) == (1, "")
    submission = bench.run / "submission"
    assert bench.calls_of("run_half") == [
        f"trial open {bench.run} {submission} 0",
        f"trial close {bench.run} {submission} 0 done",
        f"trial open {bench.run} {submission} 4",
        f"trial close {bench.run} {bench.run}/submission 4 failed",
    ]
    assert (
        bench.run / "trials" / "4" / "slurm.log"
    ).read_text() == "paceline: job 5_3: trial 4: failed\n"
    assert bench.requeues() == []


def test_the_folder_of_a_sweep_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "R&D *"
    folder.mkdir()
    bench = Bench(folder)
    bench.trials("0 1", 0, 1)
    assert bench.carry_out("echo done >verdict", TASK, **TASK_3) == (0, "")
    for trial in "01":
        verdict = bench.run / "trials" / trial / "job-starts" / "5_3-0" / "verdict"
        assert verdict.read_text() == "done\n"


@pytest.mark.parametrize("slots", [1, 2])
def test_trials_that_stop_have_no_result_and_requeue_their_task(bench: Bench, slots: int) -> None:
    bench.trials("0 1 2", 0, 1, 2)
    process = bench.start(WAITS, TASK, slots=slots, **TASK_3)
    for trial in range(slots):
        bench.until(bench.run / "trials" / str(trial) / "job-starts" / "5_3-0" / "started")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process)[0] == 75
    assert len(bench.calls_of("srun")) == slots, "those that had not begun wait for the next start"
    assert [call.split()[1] for call in bench.calls_of("run_half")] == ["open"] * slots
    assert bench.requeues() == ["requeue 5_3"]
    for trial in range(3):
        assert (bench.run / "trials" / str(trial) / "job-starts" / "5_3-0" / "requeue").exists()


def test_exclusions_of_trials_are_combined(bench: Bench) -> None:
    bench.trials("0 1", 0, 1)
    agents = 'echo "n${PACELINE_RUN##*/}" >requeue; echo failed >verdict'
    assert bench.carry_out(agents, TASK, options="--exclude=n9", **TASK_3)[0] == 1
    assert bench.requeues() == ["requeue 5_3", "update jobid=5_3 ExcNodeList=n9,n0,n1"]
    assert [call.split()[1] for call in bench.calls_of("run_half")] == ["open", "open"], (
        "no result yet"
    )


def test_a_cancelled_sweep_is_not_requeued(bench: Bench) -> None:
    bench.trials("0 1", 0, 1)
    bench.carry_out(f'{STOPPED}; : >"$RUN/cancelled"', TASK, **TASK_3)
    assert (len(bench.calls_of("srun")), bench.requeues()) == (1, [])


def test_a_task_continues_as_another_job(bench: Bench) -> None:
    bench.trials("0 1", 0, 1)
    bench.forbid_requeue()
    agents = f"case $PACELINE_RUN in */0) {STOPPED} ;; *) : >../../result.json; {DONE} ;; esac"
    bench.carry_out(agents, TASK, **TASK_3)
    assert bench.requeues() == []
    (call,) = bench.calls_of("sbatch")
    assert (
        call
        == f"--parsable --dependency=afterany:5_3 --array=3 {bench.run}/submission/job.sbatch tasks-1"
    )
    jobs = [(bench.run / "trials" / trial / "job").read_text() for trial in "01"]
    assert jobs == ["78_3\n", "5_3\n"], "a trial with a result keeps the job that it was"


def test_stopped_without_requeue_is_the_end_of_a_trial(bench: Bench) -> None:
    bench.trials("0", 0)
    assert bench.carry_out("echo stopped >verdict", TASK, options="--no-requeue", **TASK_3)[0] == 75
    assert (
        bench.calls_of("run_half")[-1]
        == f"trial close {bench.run} {bench.run}/submission 0 stopped"
    )
    assert bench.requeues() == []


# Names that stop_and_requeue.sh might use, and that a user's `setup` lines may.
CLASHES = """\
launch() { :; }; fail() { :; }; await() { :; }; finish_job() { :; }; inside() { :; }; run_half() { :; }
export job=mine run=/nowhere python=none requeue= exclude=n9 verdict=done terminated=1 job_start=x trial=9 trials=9
export sweep=/nowhere submission=/nowhere owner=me folder=/nowhere index=7 slot=7 name=me
"""
STRICT = "set -euo pipefail; trap 'exit 99' ERR"


@pytest.mark.parametrize("setup", [CLASHES, STRICT], ids=["names", "strict"])
def test_setup_lines_do_not_break_a_job(bench: Bench, setup: str) -> None:
    assert bench.carry_out(f"{UNFIT}; exit 9", setup=setup) == (1, "paceline: job 7: failed\n")
    assert bench.calls_of("srun") == ["--nodes=1 agent"]
    assert bench.requeues() == ["requeue 7", "update jobid=7 ExcNodeList=n2,n3"]


@pytest.mark.parametrize("setup", [CLASHES, STRICT], ids=["names", "strict"])
@pytest.mark.parametrize("slots", [1, 2])
def test_setup_lines_do_not_break_a_task(bench: Bench, setup: str, slots: int) -> None:
    bench.trials("0 1", 0, 1)
    agents = 'echo "${index-}" >>"$CALLS/index"; case $PACELINE_RUN in */0) echo done >verdict ;; *) exit 9 ;; esac'
    code, out = bench.carry_out(agents, TASK, setup=setup, slots=slots, **TASK_3)  # type: ignore[arg-type]
    assert (code, out) == (0, "")
    closed = sorted(call for call in bench.calls_of("run_half") if "close" in call)
    assert closed == [
        f"trial close {bench.run} {bench.run}/submission 0 done",
        f"trial close {bench.run} {bench.run}/submission 1 failed",
    ]
    assert bench.calls_of("index") == ["7" if setup == CLASHES else ""] * 2, (
        "a trial has the user's own variables"
    )


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_strict_shell_runs_a_whole_job(bench: Bench, launcher: str) -> None:
    strict = f"{STRICT}\n{SINGLE}"
    assert bench.carry_out(f"{STOPPED}; exit 9", strict, launcher=launcher) == (
        75,
        "paceline: job 7: stopped\n",
    )
    assert bench.requeues() == ["requeue 7"]
    process = bench.start(WAITS, strict, launcher=launcher, SLURM_RESTART_COUNT="1")
    bench.until(bench.run / "job-starts" / "7-1" / "started")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process)[0] == 75
    bench.forbid_requeue()
    assert bench.carry_out(STOPPED, strict, SLURM_RESTART_COUNT="2")[0] == 75
    assert (bench.run / "job").read_text() == "78\n"


def test_a_strict_shell_runs_a_whole_task(bench: Bench) -> None:
    bench.trials("0 1 2", 0, 1, 2)
    process = bench.start(WAITS, f"{STRICT}\n{TASK}", **TASK_3)
    bench.until(bench.run / "trials" / "0" / "job-starts" / "5_3-0" / "started")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process) == (75, "")
    assert bench.requeues() == ["requeue 5_3"]


def test_noclobber_in_setup_lines_keeps_no_old_files(bench: Bench) -> None:
    bench.forbid_requeue()
    assert bench.carry_out(STOPPED, setup="set -o noclobber") == (75, "paceline: job 7: stopped\n")
    assert (bench.run / "job").read_text() == "78\n"


OPTIONS = "shopt -s failglob nocasematch; set -o noclobber"


@pytest.mark.parametrize(
    ("lines", "where"), [(OPTIONS, "environment"), (f"{OPTIONS}\nset -f", "setup")]
)
def test_options_of_the_users_shell_do_not_change_a_job(
    bench: Bench, lines: str, where: str
) -> None:
    (bench.calls / "lines").write_text(lines)
    environ = {"BASH_ENV": str(bench.calls / "lines")} if where == "environment" else {}
    for name in ("srun", "scontrol", "sbatch"):
        text = COMMANDS[name]
        (bench.bin / name).write_text(f"#!/bin/bash -p\n{text}\n")  # does not read BASH_ENV
    bench.forbid_requeue()
    setup = lines if where == "setup" else ""
    code, out = bench.carry_out(
        "printf 'n3\\nn2\\n' >requeue; echo failed >verdict", setup=setup, **environ
    )
    assert (code, out) == (1, "paceline: job 7: failed\n")
    assert bench.calls_of("sbatch") == [
        f"--parsable --dependency=afterany:7 --exclude=n2,n3 {bench.run}/job.sbatch"
    ]
    assert (bench.run / "job").read_text() == "78\n"


def test_a_job_without_a_verdict_is_not_requeued(bench: Bench) -> None:
    assert bench.carry_out("echo n2 >requeue") == (1, "paceline: job 7: failed\n")
    assert bench.requeues() == []


@pytest.mark.parametrize("verdict", ["", "don", "done\ndone"])
def test_a_verdict_that_is_cut_off_is_none(bench: Bench, verdict: str) -> None:
    assert bench.carry_out(f"printf '{verdict}' >verdict; : >requeue") == (
        1,
        "paceline: job 7: failed\n",
    )
    assert bench.requeues() == []
    assert "without a verdict" in (bench.run / "job-starts" / "7-0" / "requeue-failed").read_text()


def test_a_trial_without_a_verdict_has_failed(bench: Bench) -> None:
    bench.trials("0", 0)
    bench.carry_out("echo n2 >requeue", TASK, **TASK_3)
    assert bench.requeues() == []
    assert (
        bench.calls_of("run_half")[-1] == f"trial close {bench.run} {bench.run}/submission 0 failed"
    )


@pytest.mark.parametrize("requeue", [True, False])
def test_a_trial_that_never_began_requeues_its_task(bench: Bench, requeue: bool) -> None:
    bench.trials("0 1", 0, 1)
    agents = f"until [ -e stop ]; do /bin/sleep 0.02; done; {DONE}"
    process = bench.start(agents, TASK, options="" if requeue else "--no-requeue", **TASK_3)
    bench.until(bench.run / "trials" / "0" / "job-starts" / "5_3-0" / "started")
    process.send_signal(signal.SIGUSR1)
    assert bench.finish(process)[0] == 75
    assert bench.requeues() == ["requeue 5_3"] * requeue
    assert not [call for call in bench.calls_of("run_half") if call.endswith(" 1 stopped")], (
        "it can still run"
    )


@pytest.mark.parametrize("requeue", [True, False])
def test_a_trial_that_ends_with_its_job_has_a_result_unless_slurm_may_requeue_the_job(
    bench: Bench, requeue: bool
) -> None:
    bench.trials("0", 0)
    # killed before it could write a verdict
    agents = "until [ -e over ]; do /bin/sleep 0.02; done; exit 1"
    process = bench.start(agents, TASK, options="" if requeue else "--no-requeue", **TASK_3)
    job_start = bench.run / "trials" / "0" / "job-starts" / "5_3-0"
    bench.until(job_start / "started")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    (job_start / "over").touch()
    bench.finish(process)
    closed = [call for call in bench.calls_of("run_half") if "close" in call]
    assert closed == (
        [] if requeue else [f"trial close {bench.run} {bench.run}/submission 0 failed"]
    )
    assert bench.requeues() == []


def test_a_task_that_is_ended_while_a_trial_is_opened_still_closes_it(bench: Bench) -> None:
    bench.trials("0", 0)
    opens = '{{ echo "$*" >>"$CALLS/run_half"; [ "$2" = close ] || /bin/sleep 1; }}'
    task = TASK.replace('{{ echo "$*" >>"$CALLS/run_half"; }}', opens)
    process = bench.start(WAITS, task, options="--no-requeue", **TASK_3)
    bench.until(bench.calls / "run_half")
    process.send_signal(signal.SIGTERM)
    bench.finish(process)
    assert [call.split()[1] for call in bench.calls_of("run_half")] == ["open", "close"]
    assert bench.calls_of("srun") == []


def test_a_trial_that_cannot_be_opened_has_failed(bench: Bench) -> None:
    bench.trials("0", 0)
    text = TASK.replace('>>"$CALLS/run_half"; ', '>>"$CALLS/run_half"; [ "$2" != open ]; ')
    assert bench.carry_out(DONE, text, **TASK_3)[0] == 1
    assert (
        bench.calls_of("run_half")[-1] == f"trial close {bench.run} {bench.run}/submission 0 failed"
    )
    assert (bench.calls_of("srun"), bench.requeues()) == ([], [])
    job_start = bench.run / "trials" / "0" / "job-starts" / "5_3-0"
    assert ((job_start / "verdict").read_text(), (job_start / "requeue").exists()) == (
        "failed\n",
        False,
    )
