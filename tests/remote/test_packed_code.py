"""Which files of a project go to a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.on_cluster import cluster_request
from paceline.errors import EnvironmentProblem
from paceline.launch import code_snapshot
from paceline.spec import Program
from paceline.spec.load import load_job
from paceline.ssh.code_push.project_code import pack_code


def test_fetched_runs_stay_here_whatever_folder_the_cluster_uses(tmp_path: Path) -> None:
    project = tmp_path / "project"
    fetched = project / "runs" / "project" / "default" / "20260101-120000-aaaa"
    fetched.mkdir(parents=True)
    (fetched / "weights.safetensors").write_text("large")
    (project / "train.py").write_text("print(1)\n")
    (project / "paceline.toml").write_text(
        '[profiles.alps.project]\nscratch = "/scratch/me/runs"\n'
    )
    job = load_job(Program("train.py"), cwd=project, profile="alps")
    assert job.project.scratch == "/scratch/me/runs"
    parcel = pack_code(job, {}, runs=[project / "runs"], cluster="alps")
    assert sorted(parcel.code.files) == ["paceline.toml", "train.py"]


def test_code_that_is_too_large_is_data_to_push(tmp_path: Path) -> None:
    """--no-snapshot would not help: the cluster has no other copy."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)\n")
    (project / "my data.bin").write_bytes(bytes(range(250)) * 8_400)
    (project / "paceline.toml").write_text('[project]\nsnapshot_limit = "2M"\n')
    job = load_job(Program("train.py"), cwd=project)
    with pytest.raises(EnvironmentProblem, match=r"2\.1 MB, at most 2\.0 MB allowed") as found:
        pack_code(job, {}, runs=[], cluster="alps")
    assert "paceline data push 'my data.bin' --on alps" in found.value.hint
    assert "--no-snapshot" not in found.value.hint


def test_too_many_files_are_data_to_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No option raises their number, and neither --no-snapshot nor snapshot_limit would help."""
    monkeypatch.setattr(code_snapshot, "MAX_FILES", 5)
    for name in (
        "train.py",
        "paceline.toml",
        *(f"my images/{number}/0.png" for number in range(6)),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    job = load_job(Program("train.py"), cwd=tmp_path)
    with pytest.raises(
        EnvironmentProblem, match=r"has more than 5 files\. Most are in my images"
    ) as found:
        pack_code(job, {}, runs=[], cluster="alps")
    assert "paceline data push 'my images' --on alps" in found.value.hint
    assert "snapshot" not in found.value.hint
    with pytest.raises(EnvironmentProblem, match="has more than 5 files") as found:
        code_snapshot.list_code(tmp_path, limit=1 << 30)
    assert "--no-snapshot" in found.value.hint
    assert "snapshot_limit" not in found.value.hint


def test_what_takes_the_output_of_the_command_is_no_code(tmp_path: Path) -> None:
    """As in `paceline submit --on alps train.py > out.txt`: the file would change on the way."""
    (tmp_path / "train.py").write_text("print(1)\n")
    program = (
        "import sys; from pathlib import Path; from paceline.ssh.code_push.project_code import pack_code;"
        "from paceline.spec import Program; from paceline.spec.load import load_job; here = Path.cwd();"
        "job = load_job(Program('train.py'), cwd=here, default_folder=here);"
        "print(*pack_code(job, {}, runs=[here / 'runs'], cluster='alps').code.files)"
    )
    with open(tmp_path / "out.txt", "w") as output:
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdout=output, check=True)
    assert (tmp_path / "out.txt").read_text() == "train.py\n"


def test_a_scratch_folder_that_only_the_cluster_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline.toml").write_text('[project]\nscratch = "$SCRATCH_THERE/runs"\n')
    monkeypatch.chdir(tmp_path)
    assert cluster_request._runs_here() == []
