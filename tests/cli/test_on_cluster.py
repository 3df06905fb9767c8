"""`--on` where it is mistyped: nothing runs in a place that nobody meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.cli import dispatch, on_cluster
from paceline.errors import ClusterError, NoSlurm, UsageError


@pytest.fixture(autouse=True)
def project(guard: None, tmp_path: Path) -> Iterator[None]:
    """A project with two clusters, on a machine without ssh and Slurm."""
    (tmp_path / "paceline.toml").write_text(
        '[profiles.alps]\nhost = "alps"\n[profiles.cedar]\nhost = "cedar"\n[profiles.birch]\n'
    )
    (tmp_path / "train.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HOME", str(tmp_path))
        patch.setenv("PATH", "/nowhere")
        yield


@pytest.mark.parametrize(
    ("line", "text", "hint"),
    [
        ("submit --on alps,cedar train.py", "This takes one cluster", "Add --first"),
        ("logs --on alps,cedar last", "This takes one cluster", "once for each of alps, cedar"),
        ("ps --on alp", "There is no cluster 'alp'.", "Did you mean 'alps'?"),
        (
            "ps --on elm",
            "There is no cluster 'elm'. You have alps, cedar.",
            '[profiles.elm]\n    host = "',
        ),
        ("ps --on birch", "[profiles.birch] of ", 'host = "login.example.org"'),
        ("run --on alps train.py", "No such option: --on.", "paceline ps --on CLUSTER"),
        ("sandbox --on alps up", "No such option: --on.", "paceline ps --on CLUSTER"),
        (
            "sweep --local --on alps sweep.toml",
            "would run the trials on the login node of alps",
            "Omit --local",
        ),
    ],
)
def test_mistakes_are_errors(line: str, text: str, hint: str) -> None:
    with pytest.raises(UsageError) as problem:
        dispatch(line.split())
    assert text in problem.value.message
    assert hint in problem.value.hint


@pytest.mark.parametrize("line", ["--on alps ps", "--on=alps ps -n 3", "env --on alps list"])
def test_an_option_before_the_command_is_an_error_that_says_where_it_goes(line: str) -> None:
    with pytest.raises(UsageError, match="No such option: --on") as problem:
        dispatch(line.split())
    assert "paceline ps --on CLUSTER" in problem.value.hint


@pytest.mark.parametrize(
    ("line", "is_cluster"),
    [
        ("submit train.py --on alps", True),
        ("run --dry-run train.py 3 --on alps", True),
        ("submit train.py --on", False),
        ("submit train.py --on gpu", False),  # the script's own
        ("submit train.py --only alps", False),
    ],
)
def test_an_option_after_the_script_is_pointed_out(
    line: str, is_cluster: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(ClusterError):  # there is no Slurm
        dispatch(line.split())
    assert ("--on alps goes to the script" in capsys.readouterr().err) == is_cluster


@pytest.mark.parametrize("line", ["submit train.py", "sweep sweep.toml", "env build", "shell"])
def test_without_slurm_the_error_points_to_a_cluster(line: str) -> None:
    Path("sweep.toml").write_text('[sweep]\nscript = "train.py"\n[space]\nx = [1, 2]\n')
    Path("requirements.txt").write_text("numpy\n")
    with pytest.raises(NoSlurm) as problem:
        dispatch(line.split())
    assert "--on alps ...\n  Otherwise, " in problem.value.hint


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        (
            "submit --on alps --yes --gpus 4 train.py --yes",
            "submit --gpus-per-node=4 train.py --yes",
        ),
        ("submit --yes --on alps -J --yes train.py", "submit --name=--yes train.py"),
        ("sweep sweep.toml --on alps --yes", "sweep sweep.toml"),
        ("env build --yes --on=alps --local", "env build --local"),
        ("clean --yes --on alps", "clean --yes"),
    ],
)
def test_what_answers_a_question_of_this_machine_is_no_part_of_the_line(
    line: str, sent: str
) -> None:
    """So the same command with `--yes` is the same command: it looks for a job whose answer was lost."""
    Path("sweep.toml").write_text('[sweep]\nscript = "train.py"\n[space]\nx = [1, 2]\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            on_cluster, "make_request", lambda asked, _: pytest.fail(" ".join(asked.line))
        )
        with pytest.raises(pytest.fail.Exception) as caught:
            dispatch(line.split())
    assert caught.value.msg == sent


def test_without_slurm_and_without_a_cluster_the_error_says_how_to_name_one(guard: None) -> None:
    Path("paceline.toml").unlink()
    with pytest.raises(NoSlurm) as problem:
        dispatch(["submit", "train.py"])
    assert '[profiles.alps]\n    host = "login.example.org"\n' in problem.value.hint
    assert "paceline submit --on alps" in problem.value.hint
    assert "Otherwise, run this on a login node of your cluster" in problem.value.hint
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_ON_CLUSTER", "alps")
        with pytest.raises(NoSlurm) as problem:
            dispatch(["submit", "train.py"])
    assert "setup" in problem.value.hint
    assert "--on" not in problem.value.hint
