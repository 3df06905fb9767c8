"""Settings of how a script is asked to stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cli


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with a scratch folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PACELINE_SCRATCH", str(tmp_path / "scratch"))
        yield tmp_path


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--stop-signal", "SIGUSR2"], "use one of SIGUSR1, SIGTERM, SIGINT, SIGHUP"),
        (["--saved-exit-code", "256"], "--saved-exit-code"),
    ],
)
def test_invalid_settings(
    flags: list[str], error: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "train.py").touch()
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--dry-run", *flags, "train.py"])
    assert left.value.code == 2
    assert error in capsys.readouterr().err
