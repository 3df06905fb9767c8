"""Files, profiles and flags become one Job; what is wrong is said with file, key, found, expected, nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.spec import Flag, Job, Program, load_job
from paceline.spec.load import parse_param, parse_value

SCRIPT = Program("train.py")


def load(folder: Path, text: str, *flags: tuple[str, str, Any], **options: Any) -> Job:
    (folder / "paceline.toml").write_text(text)
    return load_job(SCRIPT, flags=[Flag(*flag) for flag in flags], cwd=folder, **options)


# What stands in the file, and the words that the error must hold besides the file's name.
WRONG = {
    "unknown key": ("[job]\nnods = 2", ["[job]", "'nods'", "'nodes'"]),
    "unknown table": ("[jobs]\nnodes = 2", ["'jobs'", "'job'"]),
    "key of another table": ('[job]\nstyle = "fork"', ["[job]", "'style'", "belongs in [launch]"]),
    "nothing near": ("[resume]\nzzz = 1", ["[resume]", "'zzz'", "knows: grace, hang_timeout"]),
    "a text for a number": ('[job]\nnodes = "two"', ["[job] nodes", 'found "two"', "expected a whole number"]),
    "true for a number": ("[job]\nnodes = true", ["[job] nodes", "found true", "a whole number"]),
    "a number for a text": ("[job]\npartition = 3", ["[job] partition", "found 3", "a text in quotes"]),
    "too small": ("[job]\nnodes = 0", ["[job] nodes", "found 0", "at least 1"]),
    "no such choice": ('[launch]\nstyle = "frok"', ["[launch] style", '"frok"', 'one of "fork", "srun"']),
    "a text for a list": ('[environment]\nmodules = "cuda"', ["[environment] modules", '"cuda"', "a list of texts"]),
    "a list in variables": ("[environment.variables]\nA = [1]", ["[environment] variables", "a number for A"]),
    "a bad variable": ('[environment.variables]\n"A B" = "1"', ["[environment] variables", "'A B'"]),
    "a number for a table": ("job = 3", ["[job]", "found 3", "expected a table"]),
    "a bad time": ('[job]\ntime = "7"', ["[job] time", '"7"', '"90m"']),
    "a bad size": ('[job]\nmem_per_gpu = "lots"', ["[job] mem_per_gpu", '"lots"', '"32G"']),
    "a bad window": ('[runtime]\nprofile = "4:2"', ["[runtime] profile", '"4:2"', "first:end"]),
    "a name with a slash": ('[project]\nexperiment = "a/b"', ["[project] experiment", '"a/b"', "a folder's"]),
    "a profile's key": ("[profiles.x.job]\nnodez = 1", ["[profiles.x.job]", "'nodez'", "'nodes'"]),
    "a profile's value": ('[profiles.x.job]\nnodes = "a"', ["[profiles.x.job] nodes", '"a"', "a whole number"]),
    "profiles that are none": ("profiles = 3", ["[profiles]", "found 3", "[profiles.NAME.job]"]),
    "no TOML": ("[job\nnodes = 1", ["is not TOML", "line 1"]),
    "a venv without a path": ('[environment]\nkind = "venv"', ["environment.kind", "no path"]),
    "a container without image": ('[environment]\nkind = "container"', ["environment.kind", "no image"]),
    "two amounts of memory": (
        '[job]\nmem_per_gpu = "1G"\nmem_per_node = "1G"',
        ["job.mem_per_gpu", "job.mem_per_node"],
    ),
    "too short a grace": ('[job]\ntime = "2h"\n[resume]\ngrace = "10s"', ["resume.grace", "10 s", "at least 60 s"]),
    "too long a grace": (
        '[job]\ntime = "10m"\n[resume]\ngrace = "5m"',
        ["resume.grace", "job.time", "less than half"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str, tmp_path: Path) -> None:
    text, words = WRONG[case]
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    for word in (str(tmp_path / "paceline.toml"), *words):
        assert word in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (("--nodes", "job.nodes", 0), "--nodes: found 0, expected at least 1"),
        (("--style", "launch.style", "x"), '--style: found "x", expected one of "fork"'),
        (("--env", "environment.variables", {"A B": "1"}), "--env"),
    ],
)
def test_a_wrong_flag_is_named(flag: tuple[str, str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, "", flag)
    assert words in str(caught.value)


def test_flags_win_over_the_profile_and_that_over_the_file(tmp_path: Path) -> None:
    text = """
[job]
nodes = 2
partition = "main"
time = "2h"
[environment.variables]
A = "file"
B = 1
[params]
lr = 0.1
[params.model]
width = 64
depth = 2
[profiles.big.job]
nodes = 8
time = "1-00:00:00"
[profiles.big.environment.variables]
A = "profile"
"""
    job = load(tmp_path, text, ("--nodes", "job.nodes", 4), profile="big", params=["model.width=128", "lr=1"])
    assert (job.resources.nodes, job.resources.time, job.resources.partition) == (4, 86400, "main")
    assert job.environment.variables == {"A": "profile", "B": "1"}
    assert job.params == {"lr": 1, "model": {"width": 128, "depth": 2}}
    file = tmp_path / "paceline.toml"
    assert job.source("job.nodes") == "--nodes"
    assert job.source("job.time") == f"job.time in profile big of {file}"
    assert job.source("job.partition") == f"job.partition in {file}"
    assert not job.is_set("job.qos")
    assert job.folder == tmp_path


def test_a_grace_that_nobody_set_fits_a_short_job(tmp_path: Path) -> None:
    assert load(tmp_path, '[job]\ntime = "3m"').grace == 60
    assert load(tmp_path, '[job]\ntime = "3h"').grace == 120


def test_what_lies_in_the_home_folder_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[environment]\nkind = "container"\nimage = "~/torch.sif"\nbinds = ["~/data:/data", "/opt"]'
    with monkeypatch.context() as patch:
        patch.setenv("HOME", "/home/ann")
        environment = load(tmp_path, text).environment
    assert environment.image == "/home/ann/torch.sif"
    assert environment.binds == ("/home/ann/data:/data", "/opt")


def test_an_unknown_profile_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, "[profiles.juwels.job]\nnodes = 1", profile="jewels")
    assert "'juwels'" in str(caught.value)


def test_the_job_is_frozen(tmp_path: Path) -> None:
    job = load(tmp_path, "")
    with pytest.raises(ValueError, match="frozen"):
        job.resources.nodes = 3


def test_the_file_is_searched_up_to_the_repository_and_no_further(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    inner = repository / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "paceline.toml").write_text("[job]\nnodes = 9")
    (repository / ".git").mkdir()
    job = load_job(SCRIPT, cwd=inner)
    assert (job.file, job.folder, job.resources.nodes) == (None, repository, 1)
    (repository / "pyproject.toml").write_text("[tool.paceline.job]\nnodes = 3")
    job = load_job(SCRIPT, cwd=inner)
    assert (job.file, job.resources.nodes) == (repository / "pyproject.toml", 3)
    (repository / "a" / "paceline.toml").write_text("[job]\nnodes = 5")
    assert load_job(SCRIPT, cwd=inner).resources.nodes == 5
    assert load_job(SCRIPT, cwd=inner, config=tmp_path / "paceline.toml").resources.nodes == 9


def test_without_a_repository_only_this_folder_counts(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "paceline.toml").write_text("[job]\nnodes = 9")
    assert load_job(SCRIPT, cwd=inner).file is None


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_job(SCRIPT, cwd=tmp_path, config=tmp_path / "other.toml")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("lr=0.1", ["lr"], 0.1), ("n=3", ["n"], 3), ("on=true", ["on"], True), ("name=adam", ["name"], "adam"),
        ("a.b=[1, 2]", ["a", "b"], [1, 2]), ('q="x y"', ["q"], "x y"), ("e=", ["e"], ""),
        ("d=2024-01-01", ["d"], "2024-01-01"),
        ("two=1\nb = 2", ["two"], "1\nb = 2"), ("eq=a=b", ["eq"], "a=b"), ("t={x = 1}", ["t"], {"x": 1}),
    ],
)  # fmt: skip
def test_params_are_typed_by_toml(text: str, path: list[str], value: Any) -> None:
    assert parse_param(text) == (path, value)


@pytest.mark.parametrize("text", ["lr", "=3", "a..b=1"])
def test_what_is_no_param(text: str) -> None:
    with pytest.raises(SpecError, match="key=value"):
        parse_param(text)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_some_value(text: str) -> None:
    assert parse_value(text) is not None
