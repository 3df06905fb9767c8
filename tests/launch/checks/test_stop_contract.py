"""How a script is asked to stop, as `run --dry-run`, `submit --dry-run` and `show` print it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cli

TRAINER = "from transformers import Trainer\nTrainer(model).train(resume_from_checkpoint=newest)\n"
LIGHTNING = "import lightning\nlightning.Trainer().fit(model)\n"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with a scratch folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PACELINE_SCRATCH", str(tmp_path / "scratch"))
        yield tmp_path


@pytest.mark.parametrize(
    ("source", "flags", "expected"),
    [
        (
            TRAINER,
            [],
            "SIGTERM (preset of the Hugging Face Trainer); exit code 0 or 75 means that it has saved",
        ),
        (
            TRAINER,
            ["--stop-signal", "SIGUSR1"],
            "SIGUSR1 (set); exit code 75 means that it has saved",
        ),
        (LIGHTNING, [], "; not before the time limit, as the script never sets ckpt_path\n"),
        (
            LIGHTNING,
            ["--requeue-always"],
            "(preset of the Lightning Trainer); exit code 0 or 75 means that it has saved",
        ),
        (
            "print()",
            ["--saved-exit-code", "3"],
            "SIGUSR1; exit code 3 or 75 means that it has saved",
        ),
        ("import paceline\nrun = paceline.start()", [], None),
    ],
)
def test_a_dry_run_shows_it(
    source: str,
    flags: list[str],
    expected: str | None,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "train.py").write_text(source)
    for command, title in (
        ("submit", "# signal that asks each rank to stop: "),
        ("run", "stop        "),
    ):
        if command == "run" and "--requeue-always" in flags:
            continue
        with pytest.raises(SystemExit) as left:
            cli.main([command, "--dry-run", *flags, "train.py"])
        printed = capsys.readouterr()
        assert not left.value.code, printed.err
        if expected is None:
            assert title not in printed.out
        else:
            assert expected in printed.out.partition(title)[2]


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
