"""`/etc/paceline/site.toml`: defaults, limits, and who may write it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.launch.checks import inspect_site
from paceline.launch.launch_spec import data_settings
from paceline.spec import load, settings
from paceline.spec.job import Job, Program
from paceline.spec.load import load_job, reload_job
from paceline.spec.option import Flag
from paceline.watch.scheduler import poll_interval

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root's file counts")
pytestmark = ROOT

TEXT = """\
[defaults]
partition = "gpu"
account = "research"

[limits]
requeues_per_day = 10
keep_data = "2d"
stage_size = "500G"
poll_interval = "90s"
"""


@pytest.fixture
def write_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Write the site's file of this test."""
    path = tmp_path / "etc" / "site.toml"
    path.parent.mkdir(mode=0o755)

    def write(text: str) -> Path:
        path.write_text(text)
        path.chmod(0o644)
        settings.find_site.cache_clear()
        return path

    with monkeypatch.context() as patch:
        patch.setattr(settings, "SITE_FILE", path)
        patch.setattr(load, "SITE_FILE", path)
        yield write
    settings.find_site.cache_clear()


def load_of(tmp_path: Path, text: str = "", *flags: Flag) -> Job:
    (tmp_path / "paceline.toml").write_text(text)
    return load_job(Program("train.py"), cwd=tmp_path, flags=flags)


def test_defaults_are_for_jobs_that_do_not_say_otherwise(
    tmp_path: Path, write_site: Callable[[str], Path]
) -> None:
    write_site(TEXT)
    job = load_of(tmp_path)
    assert (job.resources.partition, job.resources.account) == ("gpu", "research")
    assert "site.toml" in job.source("job.partition")
    job = load_of(tmp_path, '[job]\npartition = "cpu"\n', Flag("--account", "job.account", "mine"))
    assert (job.resources.partition, job.resources.account) == ("cpu", "mine")


def test_what_nobody_has_chosen_is_lowered_to_the_limit(
    tmp_path: Path, write_site: Callable[[str], Path]
) -> None:
    write_site(TEXT)
    job = load_of(tmp_path, '[data]\nstage = ["images"]\n')
    assert job.resume.requeues_per_day == 10
    assert job.tables.data.keep is None
    assert data_settings(job)["limit"] == 500 * 2**30
    assert (
        load_of(
            tmp_path, '[resume]\nrequeues_per_day = 3\n[data]\nkeep = "1d"\n'
        ).resume.requeues_per_day
        == 3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[resume]\nrequeues_per_day = 11\n",
            "paceline.toml exceeds what this site allows: at most 10.",
        ),
        ('[data]\nkeep = "3d"\n', "paceline.toml exceeds what this site allows: at most 2d."),
    ],
)
def test_a_file_or_a_flag_above_a_limit_is_an_error(
    tmp_path: Path, write_site: Callable[[str], Path], text: str, message: str
) -> None:
    path = write_site(TEXT)
    with pytest.raises(SpecError) as caught:
        load_of(tmp_path, text)
    assert caught.value.message.endswith(message)
    assert str(path) in caught.value.hint
    with pytest.raises(SpecError, match="--requeues-per-day exceeds"):
        load_of(tmp_path, "", Flag("--requeues-per-day", "resume.requeues_per_day", 99))


def test_a_run_from_before_the_limit_goes_on_with_the_limit(
    tmp_path: Path, write_site: Callable[[str], Path]
) -> None:
    before = load_of(tmp_path, "[resume]\nrequeues_per_day = 40\n")
    write_site(TEXT)
    again = reload_job(
        before, before.tables.model_dump(mode="json", exclude_unset=True), flags=(), params=()
    )
    assert again.resume.requeues_per_day == 10


def test_the_poll_interval_is_never_below_the_site_s(
    write_site: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_site(TEXT)
    assert poll_interval() == 90
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_POLL_INTERVAL", "1")
        assert poll_interval() == 90
        patch.setenv("PACELINE_POLL_INTERVAL", "5m")
        assert poll_interval() == 300
    write_site("[limits]\nrequeues_per_day = 10\n")
    assert poll_interval() == 60


def test_doctor_shows_what_the_site_sets(write_site: Callable[[str], Path]) -> None:
    assert inspect_site() == []
    write_site(TEXT)
    (found,) = inspect_site()
    assert found.text.startswith(
        "partition gpu, account research, requeues_per_day 10, keep_data 2d, stage_size 500G,"
        " poll_interval 90 s"
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "[limits]\nrequeus_per_day = 3\n",
            "Unknown key 'requeus_per_day' in [limits]",
            "'requeues_per_day'",
        ),
        ("[limit]\nrequeues_per_day = 3\n", "Unknown key 'limit' in ", "'limits'"),
        (
            '[defaults]\ntime = "4h"\n',
            "Unknown key 'time' in [defaults]",
            "Use one of account, partition.",
        ),
        ("[limits]\nrequeues_per_day = 0\n", "Invalid requeues_per_day = 0 in [limits]", ""),
        ('[limits]\nstage_size = "many"\n', 'Invalid stage_size = "many" in [limits]', ""),
        ("[limits\n", "SITE is not valid TOML", "administrators"),
        ("limits = 3\n", "Invalid limits = 3 in ", ""),
    ],
)
def test_mistakes_name_the_key_and_the_nearest(
    tmp_path: Path, write_site: Callable[[str], Path], text: str, message: str, hint: str
) -> None:
    path = write_site(text)
    with pytest.raises(SpecError) as caught:
        load_of(tmp_path)
    assert caught.value.message.startswith(message.replace("SITE", str(path)))
    assert hint in caught.value.hint
