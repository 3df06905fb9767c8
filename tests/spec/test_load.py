"""Files, profiles and flags become one Job; errors name the file, the key, the value and what to use instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.spec.job import Job, Program
from paceline.spec.load import ClusterProfile, load_job
from paceline.spec.option import NAME_OR_PATH, PATH, Flag, read_flags
from paceline.spec.settings import options_of, parse_param, parse_value

SCRIPT = Program("train.py")


def load(folder: Path, text: str, *flags: tuple[str, str, Any], **options: Any) -> Job:
    (folder / "paceline.toml").write_text(text)
    return load_job(SCRIPT, flags=[Flag(*flag) for flag in flags], cwd=folder, **options)


# The text of a file, and what the error must contain; FILE is its path.
WRONG = {
    "unknown key": (
        "[job]\nnods = 2",
        ["Unknown key 'nods' in [job] of FILE.", "Did you mean 'nodes'?"],
    ),
    "key of another tool": (
        "[job]\nranks_per_node = 2",
        ["Unknown key 'ranks_per_node' in [job] of FILE.", "Did you mean 'nproc' in [launch]?"],
    ),
    "a setting of the script": (
        "[runtime]\nlr = 0.1",
        ["'lr' in [runtime]", "train.py --lr", "[params]", "run.params.lr"],
    ),
    "a flag in the wrong table": (
        "[runtime]\nsave_every_seconds = 5",
        ["Did you mean 'every_seconds' in [checkpoint]?"],
    ),
    "a name that is a flag": ('[job]\nname = "-x"', ["use a name that does not begin with a dash"]),
    "near a key of another table": (
        "[job]\nhang_timout = 2",
        ["Did you mean 'hang_timeout' in [resume]?"],
    ),
    "unknown table": ("[jobs]\nnodes = 2", ["Unknown key 'jobs' in FILE.", "Did you mean 'job'?"]),
    "key of another table": (
        '[job]\nstyle = "fork"',
        ["Unknown key 'style' in [job] of FILE.", "Move it to [launch]"],
    ),
    "nothing near": (
        "[resume]\nzzz = 1",
        ["'zzz' in [resume]", "Use one of exit_timeout, grace, hang_timeout"],
    ),
    "a string for a number": (
        '[job]\nnodes = "two"',
        ['Invalid nodes = "two" in [job] of FILE: use a whole number.'],
    ),
    "true for a number": (
        "[job]\nnodes = true",
        ["Invalid nodes = true in [job] of FILE: use a whole number."],
    ),
    "a number for a string": (
        "[job]\npartition = 3",
        ['partition = 3 in [job] of FILE: use a string, e.g. "text".'],
    ),
    "too small": ("[job]\nnodes = 0", ["Invalid nodes = 0 in [job] of FILE: use at least 1."]),
    "no such choice": (
        '[launch]\nstyle = "frok"',
        ['style = "frok" in [launch] of FILE: use one of fork, srun'],
    ),
    "a string for a list": (
        '[environment]\nmodules = "cuda"',
        ['modules = "cuda" in [environment] of FILE'],
    ),
    "a list in variables": (
        "[environment.variables]\nA = [1]",
        ["variables = {A} in [environment]", "a number for A"],
    ),
    "a bad variable": (
        '[environment.variables]\n"A B" = "1"',
        ["variables = {A B} in [environment]", "'A B'"],
    ),
    "a variable of ours": (
        "[environment.variables]\nRANK = 1",
        ["{RANK} in [environment]", "RANK is reserved"],
    ),
    "a number for a table": ("job = 3", ["Invalid job = 3 in FILE: use a table."]),
    "a bad time": (
        '[job]\ntime = "7x"',
        ['Invalid time = "7x" in [job] of FILE: use a duration such as 90m'],
    ),
    "a bare time": (
        "[job]\ntime = 30",
        ['time = 30 in [job] of FILE: use a duration such as "30m" or "2:30:00".'],
    ),
    "no time": ('[job]\ntime = "0"', ['time = "0" in [job] of FILE: use a time limit above zero']),
    "a bare number in quotes": (
        '[resume]\ngrace = "7"',
        ['Invalid grace = "7" in [resume] of FILE: use a duration'],
    ),
    "a bad size": (
        '[job]\nmem_per_gpu = "lots"',
        ['mem_per_gpu = "lots" in [job] of FILE: use a size such as 512M'],
    ),
    "a name with a slash": (
        '[project]\nexperiment = "a/b"',
        ['experiment = "a/b" in [project] of FILE: use a folder'],
    ),
    "a profile's key": ("[profiles.x.job]\nnodez = 1", ["'nodez' in [profiles.x.job]", "'nodes'"]),
    "a profile's value": (
        '[profiles.x.job]\nnodes = "a"',
        ['nodes = "a" in [profiles.x.job] of FILE: use a whole'],
    ),
    "profiles that are none": ("profiles = 3", ["Invalid profiles = 3 in FILE: use a table."]),
    "no TOML": ("[job\nnodes = 1", ["is not valid TOML", "line 1"]),
    "a venv without a path": (
        '[environment]\nkind = "venv"',
        ["environment.kind", "there is no path", "--venv"],
    ),
    "a container without image": (
        '[environment]\nkind = "container"',
        ["environment.kind", "no image", "--image"],
    ),
    "neither true nor always": (
        '[resume]\nrequeue = "never"',
        ['requeue = "never"', "use true or false"],
    ),
    "a webhook's address": (
        '[notify]\nwebhook = "https://example.org/hush"',
        [
            "Invalid webhook = *** in [notify] of FILE: use the name of a variable that holds the address"
        ],
    ),
    "a secret in a command": (
        "[notify]\ncommand = \"curl -H 'Authorization: Bearer abc' x\"",
        ["Invalid command = *** in [notify] of FILE: use a command without secrets"],
    ),
    "an unknown event": (
        '[notify]\non = ["donee"]',
        ["use one of done, failed, stopped, requeued, stalled"],
    ),
    "no grace": ('[resume]\ngrace = "0s"', ['grace = "0s"', "use at least 1."]),
    "a grace that Slurm cannot store": (
        '[resume]\ngrace = "19h"',
        ['grace = "19h"', "use at most 65535."],
    ),
    "too many nodes": ("[job]\nnodes = 4294967297", ["nodes = 4294967297", "use at most 65536."]),
    "too much memory": ('[job]\nmem_per_node = "9999999T"', ["mem_per_node", "at most 1024T."]),
    "an exit code that is none": (
        "[resume]\nsaved_exit_code = 300",
        ["saved_exit_code = 300", "use at most 255."],
    ),
    "a size without a unit": (
        "[job]\nmem_per_node = 32",
        ["mem_per_node = 32", 'in quotes, e.g. "32G"'],
    ),
    "a switch in words": (
        '[launch]\nwarm = "yes"',
        ['warm = "yes"', 'use true, false or a duration such as "10m"'],
    ),
    "a blank name": ('[job]\npartition = " "', ['partition = " "', "use one line of text"]),
    "an event that is none": ('[notify]\non = ["foo"]', ['on = "foo"', "use one of done"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    text, parts = WRONG[case]
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    file = str(tmp_path / "paceline.toml")
    for part in ("FILE", *parts):
        assert part.replace("FILE", file) in str(caught.value)
    assert caught.value.hint or ": use " in caught.value.message


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (("--nodes", "job.nodes", 0), "Invalid --nodes 0: use at least 1."),
        (("--nodes", "job.nodes", "two"), 'Invalid --nodes "two": use a whole number.'),
        (
            ("--time", "job.time", "5x"),
            'Invalid --time "5x": use a duration such as 90m, 2h30m or 1-12:00:00.',
        ),
        (("--time", "job.time", "-5"), 'Invalid --time "-5": use a duration'),
        (("--time", "job.time", "0"), 'Invalid --time "0": use a time limit above zero'),
        (
            ("--mem-per-gpu", "job.mem_per_gpu", "32"),
            'Invalid --mem-per-gpu "32": use a size such as 512M, 32G',
        ),
        (("--style", "launch.style", "x"), 'Invalid --style "x": use one of fork, srun, torchrun,'),
        (
            ("--experiment", "project.experiment", "a/b"),
            'Invalid --experiment "a/b": use a folder name',
        ),
        (
            ("--partition", "job.partition", "a\nb"),
            'Invalid --partition "a\\nb": use one line of text',
        ),
        (("--partition", "job.partition", ""), 'Invalid --partition "": use one line of text'),
        (
            ("--env", "environment.variables", {"A B": "hush"}),
            "Invalid --env {A B}: use letters, digits and _",
        ),
        (
            ("--env", "environment.variables", {"A": "a\0b"}),
            "Invalid --env {A}: use a string without NUL",
        ),
        (
            ("--env", "environment.variables", {"A": "1", "MASTER_ADDR": "hush"}),
            "Invalid --env {A, MASTER_ADDR}: use other names: MASTER_ADDR is reserved for Paceline.",
        ),
        (
            ("--env", "environment.variables", {"PACELINE_RUN": "hush"}),
            "PACELINE_RUN is reserved for Paceline",
        ),
        (
            ("--env", "environment.variables", {"NODE_RANK": "hush"}),
            "NODE_RANK is reserved for Paceline",
        ),
    ],
)
def test_an_invalid_flag_is_named(flag: tuple[str, str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, "", flag)
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a100:4", "Write --gpus 4 --gpu-type a100."),
        ("gpu:h100:2", "Write --gpus 2 --gpu-type h100."),
        ("gpu:2", "Write --gpus 2."),
        ("two", ""),
    ],
)
def test_gpus_with_a_type_as_slurm_writes_them(text: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="use a whole number") as caught:
        load(tmp_path, "", ("--gpus", "job.gpus_per_node", text))
    assert caught.value.hint == hint


def test_variables_that_set_up_the_command_line_are_the_users(tmp_path: Path) -> None:
    variables = {"PACELINE_SCRATCH": "/s", "PACELINE_SANDBOX": "/b"}
    assert (
        dict(
            load(tmp_path, "", ("--env", "environment.variables", variables)).environment.variables
        )
        == variables
    )


def test_a_time_limit_is_read_as_slurm_reads_it(tmp_path: Path) -> None:
    assert load(tmp_path, '[job]\ntime = "30"').resources.time == 1800
    assert load(tmp_path, "", ("--time", "job.time", "30")).resources.time == 1800
    assert load(tmp_path, "", ("--time", "job.time", "1-12")).resources.time == 129600
    # other durations: seconds
    assert load(tmp_path, '[job]\ntime = "2h"\n[resume]\ngrace = 90').grace == 90


def test_scripts_that_resume_by_themselves(tmp_path: Path) -> None:
    assert load(tmp_path, '[resume]\nrequeue = "always"').resume.requeue == "always"
    options = {option.name: option for _, option in options_of("submit")}
    flags = read_flags([(options["--requeue-always"], True), (options["--requeue"], None)], {})
    assert [(flag.key, flag.value) for flag in flags] == [("resume.requeue", "always")]
    assert options["--requeue-always"].all_flags == ("--requeue-always",)


def test_a_typed_path_is_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/torch.sif").touch()
    (tmp_path / "paceline.toml").touch()
    (tmp_path / ".git").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "inner")

        def typed(key: str, name: str, path: str) -> Any:
            job = load_job(SCRIPT, flags=[Flag("--x", key, name, path)])
            return getattr(job.environment, key.split(".")[1])

        assert typed("environment.path", "venv", PATH) == str(tmp_path / "inner/venv")
        assert typed("environment.path", "/venv", PATH) == "/venv"
        assert typed("environment.image", "torch.sif", NAME_OR_PATH) == str(
            tmp_path / "inner/torch.sif"
        )
        assert typed("environment.image", "docker://torch", NAME_OR_PATH) == "docker://torch"


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
    job = load(
        tmp_path,
        text,
        ("--nodes", "job.nodes", 4),
        profile="big",
        params=["model.width=128", "lr=1"],
    )
    assert (job.resources.nodes, job.resources.time, job.resources.partition) == (4, 86400, "main")
    assert job.environment.variables == {"A": "profile", "B": "1"}
    assert job.tables.params == {"lr": 1, "model": {"width": 128, "depth": 2}}
    file = tmp_path / "paceline.toml"
    assert job.source("job.nodes") == "--nodes"
    assert job.source("job.time") == f"job.time in profile big of {file}"
    assert job.source("job.partition") == f"job.partition in {file}"
    assert not job.is_set("job.qos")
    assert job.folder == tmp_path


PROFILES = """
[job]
nodes = 2
gpus_per_node = 1
[profiles.Big-One.project]
scratch = "/big"
[profiles.Big-One.job]
gpus_per_node = 8
gpu_type = "h100"
[profiles.other.job]
nodes = 1
"""


@pytest.mark.parametrize(
    ("cluster", "profile", "used"),
    [
        ("big.one", None, "Big-One"),
        ("third", None, None),
        (None, None, None),
        ("big-one", "other", "other"),
        ("big-one", "$other", "other"),
        ("big-one", "none", None),
    ],
)
def test_the_profile_of_the_cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: str | None,
    profile: str | None,
    used: str | None,
) -> None:
    """A profile that begins with "$" comes from the environment."""
    (tmp_path / "paceline.toml").write_text(PROFILES)
    with monkeypatch.context() as patch:
        if profile and profile.startswith("$"):
            patch.setenv("PACELINE_PROFILE", profile[1:])
            profile = None
        job = load_job(
            SCRIPT, cwd=tmp_path, profile=profile, cluster=ClusterProfile(lambda: cluster)
        )
    assert job.profile == used
    assert job.resources.gpus_per_node == (8 if used == "Big-One" else 1)


def test_what_runs_here_takes_only_the_folders_from_the_profile_of_the_cluster(
    tmp_path: Path,
) -> None:
    (tmp_path / "paceline.toml").write_text(PROFILES)
    job = load_job(SCRIPT, cwd=tmp_path, cluster=ClusterProfile(lambda: "big-one", ("project",)))
    assert (job.project.scratch, job.resources.gpus_per_node) == ("/big", 1)
    (tmp_path / "paceline.toml").write_text("[profiles.x.job]\nnodes = 1")
    # nothing to ask Slurm for
    load_job(SCRIPT, cwd=tmp_path, cluster=ClusterProfile(pytest.fail, ("project",)))


def test_cpu_drops_the_gpus_of_files_but_not_those_that_are_typed(tmp_path: Path) -> None:
    text, cpu = PROFILES + "[profiles.off.runtime]\ncpu = false", ("--cpu", "runtime.cpu", True)
    job = load(tmp_path, text, cpu, profile="Big-One")
    assert (job.resources.gpus_per_node, job.resources.gpu_type, job.resources.nodes) == (
        None,
        None,
        2,
    )
    assert (
        load(tmp_path, text, cpu, ("--gpus", "job.gpus_per_node", 2)).resources.gpus_per_node == 2
    )
    assert load(tmp_path, text, ("--no-cpu", "runtime.cpu", False)).resources.gpus_per_node == 1


def test_the_default_grace_fits_a_short_job(tmp_path: Path) -> None:
    assert load(tmp_path, '[job]\ntime = "3m"').grace == 60
    assert load(tmp_path, '[job]\ntime = "3h"').grace == 120
    assert load(tmp_path, '[job]\ntime = "1s"').grace == 20  # Slurm makes it a minute


def test_home_relative_paths_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '[environment]\nkind = "container"\nimage = "~/torch.sif"\nbinds = ["~/data:/data", "/opt"]'
    )
    with monkeypatch.context() as patch:
        patch.setenv("HOME", "/home/ann")
        environment = load(tmp_path, text).environment
    assert environment.image == "/home/ann/torch.sif"
    assert environment.binds == ("/home/ann/data:/data", "/opt")


def test_a_files_paths_start_at_its_folder(tmp_path: Path) -> None:
    """A job starts in another folder, and uses these as they are."""
    text = 'python = "env/bin/python"\nbinds = ["data:/data:ro", "~/x"]\nmodule_paths = ["modules", "/m"]'
    environment = load(tmp_path, f"[environment]\n{text}").environment
    assert environment.python == f"{tmp_path}/env/bin/python"
    assert environment.binds == (f"{tmp_path}/data:/data:ro", f"{Path.home()}/x")
    assert environment.module_paths == (f"{tmp_path}/modules", "/m")
    assert load(tmp_path, '[environment]\npython = "python3.11"').environment.python == "python3.11"


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


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(Path, "read_text", refuse)  # root may read everything
    with pytest.raises(
        SpecError, match=r"Cannot read .*pyproject\.toml: .*Permission denied"
    ) as caught:
        load_job(SCRIPT, cwd=tmp_path)
    assert "permissions" in caught.value.hint


def test_without_a_repository_only_this_folder_counts(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "paceline.toml").write_text("[job]\nnodes = 9")
    assert load_job(SCRIPT, cwd=inner).file is None


def test_a_missing_config(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_job(SCRIPT, cwd=tmp_path, config=tmp_path / "other.toml")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("lr=0.1", ["lr"], 0.1),
        ("n=3", ["n"], 3),
        ("on=true", ["on"], True),
        ("name=adam", ["name"], "adam"),
        ("a.b=[1, 2]", ["a", "b"], [1, 2]),
        ('q="x y"', ["q"], "x y"),
        ("e=", ["e"], ""),
        ("d=2024-01-01", ["d"], "2024-01-01"),
        ("two=1\nb = 2", ["two"], "1\nb = 2"),
        ("eq=a=b", ["eq"], "a=b"),
        ("t={x = 1}", ["t"], {"x": 1}),
    ],
)
def test_params_are_typed_by_toml(text: str, path: list[str], value: Any) -> None:
    assert parse_param(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("False", False),
        ("None", None),
        (".1", 0.1),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("1.e-3", 1e-3),
        ("[True, .1, 'a']", [True, 0.1, "a"]),
        ("5 #fff", "5 #fff"),
        ("#fff", "#fff"),
        ("5 ] #", "5 ] #"),
        ("True #", "True #"),
        ('"a # b"', "a # b"),
        ("1, 2", "1, 2"),
        ("(1, 2)", "(1, 2)"),
        ("{'a': 1}", "{'a': 1}"),
        ("b'x'", "b'x'"),
        ("1j", "1j"),
        ("007", "007"),
        ("Truely", "Truely"),
        ("[" * 900, "[" * 900),
    ],
)
def test_params_may_be_spelled_as_in_python_and_have_no_comments(text: str, value: Any) -> None:
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["lr", "=3", "a..b=1"])
def test_invalid_params(text: str) -> None:
    with pytest.raises(SpecError, match="key=value"):
        parse_param(text)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_valid_value(text: str) -> None:
    value = parse_value(text)
    assert repr(json.loads(json.dumps(value))) == repr(value)  # NaN does not equal itself


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["paceline.toml", "pyproject.toml"])
def test_files_of_strangers_in_folders_above_are_ignored(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / ".git").mkdir()
    table = "job" if name == "paceline.toml" else "tool.paceline.job"
    (tmp_path / name).write_text(f"[{table}]\nnodes = 3")
    os.chown(tmp_path / ".git", 65534, 65534)
    os.chown(tmp_path / name, 65534, 65534)
    job = load_job(SCRIPT, cwd=work)
    assert (job.folder, job.file, job.resources.nodes) == (work, None, 1)
    assert f"ignoring '{tmp_path / '.git'}', which belongs to" in caplog.text
    # In a repository of ours too.
    (work / ".git").mkdir()
    (work / name).write_text(f"[{table}]\nnodes = 3")
    os.chown(work / name, 65534, 65534)
    assert load_job(SCRIPT, cwd=work).file is None
    assert f"ignoring '{work / name}'" in caplog.text
    assert load_job(SCRIPT, cwd=work, config=work / name).resources.nodes == 3


def test_a_file_may_begin_with_a_mark_and_has_to_be_utf8_text(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_bytes(b"\xef\xbb\xbf[job]\nnodes = 2\n")
    assert load_job(SCRIPT, cwd=tmp_path, config=file).resources.nodes == 2
    file.write_bytes(b'[job]\nname = "\xe9"\n')
    with pytest.raises(SpecError, match=r"other.toml is not valid TOML: .*decode"):
        load_job(SCRIPT, cwd=tmp_path, config=file)
    with pytest.raises(SpecError, match="Is a directory"):
        load_job(SCRIPT, cwd=tmp_path, config=tmp_path)
