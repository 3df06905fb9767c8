"""Secrets of a run on this machine: the ranks have them, and nothing else shows them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from tests.agent.webhook_server import serve_webhook
from tests.secret_leaks import PlantedSecrets, in_files, in_text, plant_secrets, watch_command_lines
from tests.until import until

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def planted(tmp_path: Path) -> PlantedSecrets:
    return plant_secrets(tmp_path)


@pytest.mark.parametrize("style", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_only_ranks_get_secrets(style: str, planted: PlantedSecrets, scratch: Path) -> None:
    args = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--nproc",
        "2",
        "--cpu",
        "--style",
        style,
        *planted.args,
    ]
    environ = {**os.environ, "PACELINE_SCRATCH": str(scratch), **planted.variables}
    with watch_command_lines() as lines:
        process = subprocess.Popen(
            args,
            cwd=planted.project,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        reports = [planted.project / f"report-{rank}.json" for rank in (0, 1)]
        until(lambda: all(path.exists() and path.read_text() for path in reports), "no reports")
        lines.scan()
        (planted.project / "go").touch()
        output = process.communicate(timeout=100)[0]
    assert process.returncode == 1, output
    for path in reports:
        assert json.loads(path.read_text()) == planted.digests()
    assert "rank 1 fails" in output
    assert not in_text(output, planted.values)
    assert not in_files(scratch, planted.values)
    # Its own command line shows what the user typed there; no other process does.
    others = [line for line in lines.seen if " -m paceline run " not in line]
    assert any("import paceline.agent" in line or "from paceline.agent" in line for line in others)
    assert not [line for line in others if in_text(line, planted.values)]
    (run_json,) = scratch.glob("*/*/*/run.json")
    launch_spec = RunFolder(run_json.parent).launch_spec
    assert stat.S_IMODE(launch_spec.stat().st_mode) == 0o600


def test_output_names_secrets_without_values(
    paceline: Paceline, planted: PlantedSecrets, scratch: Path
) -> None:
    done = paceline(
        "run", "--dry-run", *planted.args, cwd=planted.project, check=True, **planted.variables
    )
    assert "FROM_DOTENV (.env)" in done.stdout
    assert "WANDB_API_KEY (~/.netrc)" in done.stdout
    assert "NAMED_SECRET (your environment)" in done.stdout
    assert not in_text(done.stdout + done.stderr, planted.values)
    doctor = paceline("doctor", cwd=planted.project, **planted.variables)
    assert "FROM_SECRETS_ENV (~/.config/paceline/secrets.env)" in doctor.stdout
    assert not in_text(doctor.stdout + doctor.stderr, planted.values)


def test_a_secret_file_readable_by_others_is_rejected(
    paceline: Paceline, planted: PlantedSecrets, scratch: Path
) -> None:
    (planted.project / ".env").chmod(0o644)
    done = paceline("run", *planted.args, cwd=planted.project, **planted.variables)
    assert done.returncode == 1
    assert (
        ".env contains secrets, but others can read it: its mode is 0644, expected 0600."
        in done.stderr
    )
    assert f"chmod 600 {planted.project / '.env'}" in done.stderr
    assert not in_text(done.stdout + done.stderr, planted.values)
    assert not scratch.exists()
    doctor = paceline("doctor", cwd=planted.project, **planted.variables)
    assert doctor.returncode == 1
    assert "chmod 600" in doctor.stdout


@pytest.mark.usefixtures("without_torch")
def test_variables_are_set_before_torch_is_imported(paceline: Paceline, tmp_path: Path) -> None:
    """The prestarted zygote does not know the file."""
    (tmp_path / ".env").write_text("CUDA_MODULE_LOADING=EAGER\n")
    (tmp_path / ".env").chmod(0o600)
    (tmp_path / "train.py").write_text(
        "import torch\nimport os, pathlib\n"
        "early = b'CUDA_MODULE_LOADING=EAGER' in pathlib.Path(f'/proc/{os.getppid()}/environ').read_bytes()\n"
        "print('early', early, os.environ['CUDA_MODULE_LOADING'])\n"
    )
    done = paceline("run", "--nproc", "1", "--cpu", "train.py", check=True)
    assert "early True EAGER" in done.stdout


def test_a_resumed_run_reads_secrets_again(
    paceline: Paceline, tmp_path: Path, scratch: Path
) -> None:
    (tmp_path / "paceline.toml").write_text('[environment]\nsecret_files = ["conf/keys.txt"]\n')
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('has', os.environ.get('FILED'), os.environ.get('A_KEY'), os.environ.get('PLAIN'))\n"
        "sys.exit(75)\n"
    )
    keys = tmp_path / "conf/keys.txt"
    keys.parent.mkdir()
    keys.write_text("FILED=hush-1\n")
    keys.chmod(0o600)
    args = ("--nproc", "1", "--cpu", "--style", "spawn")
    done = paceline("run", *args, "--env", "A_KEY=hush-2", "--env", "PLAIN=3", "train.py")
    assert "has hush-1 hush-2 3" in done.stdout
    keys.write_text("FILED=hush-4\n")
    again = paceline("run", "--resume", "last")
    assert "has hush-4 None 3" in again.stdout
    assert "pass these --env variables again if needed: A_KEY" in again.stderr
    completed = paceline("run", "--resume", "last", "--env", "A_KEY=hush-5")
    assert "has hush-4 hush-5 3" in completed.stdout
    assert "variables again" not in completed.stderr
    # What the script printed is its own; the copy of the code has no such file, and the launch spec no such value.
    assert {Path(name).name for name in in_files(scratch, {"any": "hush-"})} == {"rank-0.log"}
    assert (next(scratch.glob("*/*/*/code")) / "train.py").is_file()


def test_secrets_as_arguments_stay_out_of_run_json(
    paceline: Paceline, tmp_path: Path, scratch: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import sys; assert sys.argv[1:] == ['--api-key', 'hush-1', '--hf_token=hush-2', '--lr', '3']\n"
    )
    args = ["train.py", "--api-key", "hush-1", "--hf_token=hush-2", "--lr", "3"]
    paceline(
        "run",
        "--nproc",
        "1",
        "--cpu",
        "--style",
        "spawn",
        "--param",
        "api_key=hush-3",
        *args,
        check=True,
    )
    (path,) = scratch.glob("*/*/*/run.json")
    text = path.read_text()
    assert "hush" not in text
    assert json.loads(text)["args"] == ["--api-key", "***", "--hf_token=***", "--lr", "3"]
    dry = paceline("run", "--dry-run", "--param", "api_key=hush-3", *args, check=True).stdout
    assert "--api-key '***'" in dry
    assert "hush" not in dry
    shown = paceline("show", "last", check=True).stdout
    assert "--api-key" in shown
    assert "hush" not in shown


def test_the_address_of_a_webhook_is_a_secret(
    paceline: Paceline, scratch: Path, tmp_path: Path
) -> None:
    """A real run, to a real server: it gets the notification, and nothing shows its address."""
    with serve_webhook() as webhook:
        project = tmp_path / "project"
        project.mkdir()
        (project / "train.py").write_text("print('trained')\n")
        (project / "paceline.toml").write_text('[notify]\nwebhook = "CHAT_HOOK"\n')
        (project / ".env").write_text(f"CHAT_HOOK={webhook.address}\n")
        (project / ".env").chmod(0o600)
        with watch_command_lines() as lines:
            done = paceline("run", "--nproc", "1", "--cpu", "train.py", cwd=project, check=True)
        assert [(sent["event"], sent["project"]) for sent in webhook.received] == [
            ("done", "project")
        ]
        secret = {"CHAT_HOOK": webhook.address}
        assert not in_text(done.stdout + done.stderr, secret)
        assert not in_files(scratch, secret)
        assert not [line for line in lines.seen if in_text(line, secret)]
