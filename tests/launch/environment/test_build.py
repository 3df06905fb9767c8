"""Builds on this machine: keyed by content, one at a time, complete or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from paceline.contract.env import ON_CLUSTER
from paceline.errors import ClusterError, EnvironmentProblem, SpecError
from paceline.launch.environment.build import BuildProgress
from paceline.launch.environment.build_script import (
    MARKER,
    BuildFolder,
    BuildResources,
    build_directives,
    render_build,
)
from paceline.launch.environment.store import StoredEnvironment
from paceline.slurm.job_states import JobState
from tests.launch.environment.jobs import job_in
from tests.launch.environment.wheels import write_wheel
from tests.slurm.runs import Paceline
from tests.until import until

pytestmark = pytest.mark.timeout(900)
TIMEOUT = 400
PROJECT = '[project]\nname = "p"\n'
USES_IT = PROJECT + '[environment]\nkind = "venv"\nrequirements = "requirements.txt"\n'


def project(
    folder: Path, requirements: str, *, config: str = USES_IT, script: str = "import tiny\n"
) -> Path:
    folder.mkdir()
    (folder / "paceline.toml").write_text(config)
    (folder / "requirements.txt").write_text(requirements)
    (folder / "train.py").write_text(script)
    return folder


def entries(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.name != "cache")


def test_built_once_and_used_by_runs(tmp_path: Path, scratch: Path, paceline: Paceline) -> None:
    script = "import sys, tiny; print(f'tiny {tiny.VERSION} of {sys.prefix}')\n"
    home = project(
        tmp_path / "my project", "--no-index\n./wheels/tiny-1.0-py3-none-any.whl\n", script=script
    )
    write_wheel(home / "wheels", "tiny")
    args = ("run", "--nproc", "1", "--cpu", "train.py")
    early = paceline(*args, cwd=home)
    assert early.returncode == 1
    assert "The environment from requirements.txt is not built" in early.stderr
    assert "paceline env build --local" in early.stderr

    done = paceline(
        "env",
        "build",
        "--local",
        timeout=TIMEOUT,
        cwd=home,
        check=True,
        PIP_INDEX_URL="https://ann:hush@nowhere.invalid",
    )
    assert "Successfully installed tiny-1.0" in done.stdout
    assert "runs that are submitted from now on use it" in done.stdout
    store = scratch / "p" / ".environments"
    key, built = entries(store)
    assert built.startswith(f"{key}.build-")
    assert not (store / built / "environment.sh").exists()
    assert json.loads((store / key / MARKER).read_text())["from"] == ["requirements.txt"]
    assert "tiny" in (store / key / "packages.txt").read_text()
    assert not any("hush" in path.read_text(errors="ignore") for path in store.rglob("*.json"))

    again = paceline("env", "build", "--local", timeout=TIMEOUT, cwd=home, check=True)
    assert again.stdout.startswith(f"up to date: {store / key}\n")
    run = paceline(*args, cwd=home, check=True)
    assert f"tiny 1.0 of {store / key}" in run.stdout

    write_wheel(home / "wheels", "tiny", needs="other")  # the same name, another content
    changed = paceline(*args, cwd=home)
    assert "or its inputs have changed since" in changed.stderr


def test_a_failing_build_leaves_nothing_and_prints_the_error(
    tmp_path: Path, scratch: Path, paceline: Paceline
) -> None:
    home = project(tmp_path / "project", "--no-index\nno-such-package-xyz\n")
    done = paceline("env", "build", "--local", timeout=TIMEOUT, cwd=home)
    assert done.returncode == 1
    assert "No matching distribution found for no-such-package-xyz" in done.stderr
    assert "Cannot install the requirements" in done.stderr
    (folder,) = entries(scratch / "p" / ".environments")
    assert ".build-" in folder, "the log of what failed is all that stays"
    assert not (scratch / "p" / ".environments" / folder / "environment.sh").exists()


def test_paths_are_relative_to_the_current_folder(tmp_path: Path, paceline: Paceline) -> None:
    home = project(tmp_path / "project", "rich\n", config=PROJECT)
    subprocess.run(["git", "init", "--quiet", str(home)], check=True)
    (home / "parts").mkdir()
    (home / "parts" / "more.txt").write_text("psutil\n")
    done = paceline("env", "build", "--dry-run", "more.txt", cwd=home / "parts", check=True)
    assert " of p: parts/more.txt\n" in done.stdout
    done = paceline(
        "env", "build", "--dry-run", "../requirements.txt", cwd=home / "parts", check=True
    )
    assert " of p: requirements.txt\n" in done.stdout


def test_build_explains_other_kinds(tmp_path: Path, paceline: Paceline) -> None:
    config = PROJECT + '[environment]\nkind = "conda"\npath = "/opt/conda/envs/x"\n'
    home = project(tmp_path / "project", "", config=config)
    assert "conda env create" in paceline("env", "build", cwd=home).stderr
    (home / "paceline.toml").write_text(
        PROJECT + '[environment]\nkind = "container"\nimage = "/x.sif"\n'
    )
    assert "set base instead of image" in paceline("env", "build", cwd=home).stderr
    (home / "paceline.toml").write_text(PROJECT)
    (home / "requirements.txt").unlink()
    assert "has nothing to build from" in paceline("env", "build", cwd=home).stderr
    (home / "requirements.txt").write_text("rich\n")
    shown = paceline(
        "env", "build", "--dry-run", "--python", "/usr/bin/python3", cwd=home, check=True
    ).stdout
    assert "python=/usr/bin/python3" in shown
    wrong = paceline("env", "build", "--python", "/nowhere/python", cwd=home)
    assert "Cannot run /nowhere/python, the Python" in wrong.stderr


def test_a_folder_that_sbatch_would_not_take_literally_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"build folder .* has a backslash in its path"):
        build_directives(job_in(tmp_path), BuildFolder(Path("/scratch/a\\b")), BuildResources())


# -- concurrent builders --------------------------------------------------------------------------------


class Bench:
    """Runs the build script with its own steps in place of pip."""

    def __init__(self, folder: Path) -> None:
        self.store = folder
        self.target = StoredEnvironment(folder / "key")

    def start(self, name: str, *steps: str) -> subprocess.Popen[str]:
        folder = BuildFolder(self.store / f"key.build-{name}")
        folder.path.mkdir()
        folder.environment.write_text("export GREETING=hello\n")
        folder.marker.write_text("{}\n")
        default = ['mkdir "$target" || paceline_fail full', f'echo {name} >"$target/by"']
        script = render_build(
            title="t",
            folder=folder,
            link=self.target.path,
            cwd=self.store,
            steps=[*default, *steps],
        )
        folder.script.write_text(script)
        return subprocess.Popen(
            ["bash", str(folder.script)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def await_builder(self, name: str) -> None:
        until((self.store / f"key.build-{name}/env/by").exists)

    def left(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.store))
            for path in [*self.store.glob("key*"), *self.store.glob("*/env*")]
            if path.is_symlink() or path.name.startswith("env")
        )


GO = "while [ ! -e go ]; do sleep 0.05; done"


def test_builders_of_the_same_environment_share_the_first_result(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    slow = bench.start("a", GO)
    bench.await_builder("a")
    assert not bench.target.is_complete
    for name, says in (("b", "built"), ("c", "already built")):
        out = (other := bench.start(name)).communicate(timeout=60)[0]
        assert (other.returncode, f"paceline: {says}: " in out.replace("built /", "built: /")) == (
            0,
            True,
        )
    (tmp_path / "go").touch()
    slow.communicate(timeout=60)
    assert slow.returncode == 0
    assert (bench.target.path / "by").read_text() == "b\n"
    assert bench.left() == ["key", "key.build-b/env"]


def test_a_build_replaces_a_link_to_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.target.path.symlink_to("key.build-gone/env")
    one = bench.start("a")
    one.communicate(timeout=60)
    assert (one.returncode, bench.target.is_complete) == (0, True)


def test_setup_lines_cannot_change_what_is_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    one = Bench(tmp_path).start(
        "a", f"target={precious} link={precious}", f"target={precious}", "paceline_fail no"
    )
    out = one.communicate(timeout=60)[0]
    assert (one.returncode, "readonly" in out) == (1, True), out
    assert precious.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_builder_cleans_up(tmp_path: Path, how: signal.Signals) -> None:
    bench = Bench(tmp_path)
    one = bench.start("a", GO)
    bench.await_builder("a")
    one.send_signal(how)
    assert one.wait(60) == 128 + how
    one.communicate()
    assert bench.left() == []


def test_a_briefly_unresponsive_scheduler_does_not_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[dict[str, JobState]] = [{"7": JobState("7", "COMPLETED")}]

    def states(jobs: list[str]) -> dict[str, JobState]:
        if not answers:
            raise ClusterError("squeue: Unable to contact slurm controller")
        return answers.pop()

    with monkeypatch.context() as patch:
        patch.setattr("paceline.launch.environment.build.STATE_INTERVAL", 0.0)
        (tmp_path / "environment.sh").touch()
        watch = BuildProgress(
            StoredEnvironment(tmp_path / "key"), BuildFolder(tmp_path), job="7", query=states
        )
        held = answers.pop()
        assert not watch.is_over()
        answers.append(held)
        assert watch.is_over()
    assert watch.state == "done"


def test_the_end_of_a_build_is_seen_at_once(tmp_path: Path) -> None:
    """While it builds, an answer of a minute ago will do; a script that has ended has removed its variables."""
    shared = {"7": JobState("7", "RUNNING")}
    folder = BuildFolder(tmp_path)
    folder.environment.touch()
    watch = BuildProgress(
        StoredEnvironment(tmp_path / "key"), folder, job="7", query=lambda _: shared
    )
    assert not any(watch.is_over() for _ in range(20))
    folder.environment.unlink()
    assert watch.is_over()


OFFLINE = """\
WARNING: Retrying after connection broken by 'NewConnectionError('[Errno -3] Temporary failure in name resolution')'
ERROR: Could not find a version that satisfies the requirement rich (from versions: none)
ERROR: No matching distribution found for rich
paceline: error: Cannot install the requirements.
"""


@pytest.mark.parametrize("on", ["", "alps"])
def test_a_node_without_internet_is_told_from_other_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    folder = BuildFolder(tmp_path)
    watch = BuildProgress(StoredEnvironment(tmp_path / "key"), folder, job="7")
    watch.state = "over"
    hints = {}
    for log in (OFFLINE, OFFLINE[OFFLINE.index("ERROR") :]):
        folder.log.write_text(log)
        with monkeypatch.context() as patch:
            patch.setenv(ON_CLUSTER, on)
            with pytest.raises(EnvironmentProblem) as raised:
                watch.check_result()
        assert raised.value.message.startswith(
            "Job 7 failed: nothing was built.\n  ERROR: Could not find"
        )
        hints[log] = raised.value.hint
    offline, other = hints.values()
    assert other == f"The full log is in {folder.log}{' on alps' if on else ''}."
    assert offline.startswith("The node cannot reach the package index")
    assert f"\n    paceline env build --local{' --on alps' if on else ''}\n" in offline
    with pytest.raises(EnvironmentProblem) as raised:
        watch.check_result(is_shown=True)
    assert raised.value.message == "Job 7 failed: nothing was built."


# -- images ---------------------------------------------------------------------------------------------

ENGINE = """\
#!/bin/bash
printf '%s\\n' "$0" "$@" >"$RECORD/argv"
env >"$RECORD/environ"
for each in "$@"; do case $each in *.sif) echo image >"$each" ;; *.def) cp "$each" "$RECORD/def" ;; esac; done
"""


@pytest.mark.parametrize("engine", ["apptainer", "singularity"])
def test_images_are_built_or_fetched_with_caches_outside_home(
    tmp_path: Path, scratch: Path, paceline: Paceline, engine: str
) -> None:
    """The engine is an executable that records how it was called; a real one needs an image to begin with."""
    record = tmp_path / "record"
    record.mkdir()
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / engine).write_text(ENGINE)
    (commands / engine).chmod(0o755)
    config = PROJECT + '[environment]\nkind = "container"\nbase = "docker://python:3.12"\n'
    home = project(
        tmp_path / "project", "rich\n", config=config + f'variables = {{ RECORD = "{record}" }}\n'
    )
    variables = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hush",
    }
    (tmp_path / "home").mkdir()
    pulled = paceline("env", "build", "--local", timeout=TIMEOUT, cwd=home, check=True, **variables)
    argv = (record / "argv").read_text().splitlines()
    image = Path(argv[2])
    assert argv == [str(commands / engine), "pull", str(image), "docker://python:3.12"]
    assert image.read_text() == "image\n"
    assert image.is_relative_to(scratch / "p" / ".environments")
    assert "runs that are submitted from now on use it" in pulled.stdout

    text = (home / "paceline.toml").read_text()
    (home / "paceline.toml").write_text(text + 'requirements = "requirements.txt"\n')
    paceline("env", "build", "--local", timeout=TIMEOUT, cwd=home, check=True, **variables)
    argv = (record / "argv").read_text().splitlines()
    assert argv[1] == "build"
    assert argv[-2].endswith("/image.sif")
    assert Path(argv[-2]) != image, "another content, another image"
    assert "From: python:3.12" in (record / "def").read_text()
    seen = dict(line.partition("=")[::2] for line in (record / "environ").read_text().splitlines())
    for name in ("CACHEDIR", "TMPDIR"):
        assert seen[f"APPTAINER_{name}"] == seen[f"SINGULARITY_{name}"]
        assert Path(seen[f"APPTAINER_{name}"]).is_relative_to(scratch)
    assert "HF_TOKEN" not in seen
    assert list((tmp_path / "home").iterdir()) == []
    again = paceline("env", "build", "--local", timeout=TIMEOUT, cwd=home, check=True, **variables)
    assert again.stdout.startswith("up to date")
