"""Train for a moment on two ranks. Run `pytest` before you submit: it finds most mistakes in
seconds.
"""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
QUICK = "@quick@"


def test_two_ranks_train(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--cpu",
        "--nproc",
        "2",
        "--scratch",
        tmp_path,
        "train.py",
    ]
    done = subprocess.run([*command, *QUICK.split()], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "@result@" in done.stdout
