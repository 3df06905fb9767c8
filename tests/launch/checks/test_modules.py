"""Modules of real module systems, as the batch script loads them and as the check before queueing sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch.checks import available_names, check_program, environment_lines
from paceline.launch.environment.activation import probe
from paceline.spec.findings import GOOD, PROBLEM, WARNING
from tests.launch.environment.jobs import (
    bare,
    environment_modules,
    in_login_shell,
    job_in,
    lmod,
    plan_of,
    write_modules,
)

IMPORTS_IT = "import hello_from_a_module\n"


@pytest.fixture(
    scope="module", params=["lmod", pytest.param("environment-modules", marks=pytest.mark.slow)]
)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The variables by which a batch shell finds the module system."""
    return (
        lmod()
        if request.param == "lmod"
        else environment_modules(tmp_path_factory.mktemp("modules"))
    )


def test_imports_from_a_module_are_found(tmp_path: Path, system: dict[str, str]) -> None:
    files = write_modules(tmp_path)
    requested = {"environment__modules": ["greet/2.0"], "environment__module_paths": [str(files)]}
    job = job_in(tmp_path / "p", IMPORTS_IT, **requested)
    found = check_program(job, plan_of(job, bare(**system)))
    assert {each.level for each in found} == {GOOD}, found
    assert [each.text for each in found if each.about == "modules"] == ["greet/2.0"]

    without = job_in(
        tmp_path / "p", IMPORTS_IT, **requested | {"environment__modules": ["greet/1.0"]}
    )
    (problem,) = (
        each
        for each in check_program(without, plan_of(without, bare(**system)))
        if each.level != GOOD
    )
    assert (problem.about, problem.level) == ("imports", PROBLEM), (
        "setup has run: nothing is left to hope for"
    )
    assert "imports hello_from_a_module, which" in problem.text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("greet/9.0", "Available versions: greet/1.0, greet/2.0."),
        ("gret", "Available versions: greet/1.0, greet/2.0."),
    ],
)
def test_a_missing_module(tmp_path: Path, system: dict[str, str], name: str, hint: str) -> None:
    files = write_modules(tmp_path)
    job = job_in(
        tmp_path / "p",
        environment__modules=["other/1", name],
        environment__module_paths=[str(files)],
    )
    (problem,) = check_program(job, plan_of(job, bare(**system)))
    assert (problem.level, problem.text) == (
        PROBLEM,
        f"Cannot load the module {name} (--environment__modules).",
    )
    assert hint in problem.hint


@pytest.mark.parametrize("purge", [None, False])
def test_modules_loaded_at_login_are_purged_unless_configured(
    tmp_path: Path, system: dict[str, str], purge: bool | None
) -> None:
    files = write_modules(tmp_path)
    login = in_login_shell(bare(**system), f"module use '{files}'; module load other")
    assert f"{tmp_path}/other-bin" in login["PATH"]
    keys = {"environment__modules": ["greet/1.0"]}
    job = job_in(tmp_path / "p", **keys, **({} if purge is None else {"environment__purge": purge}))
    plan = plan_of(job, login)
    show = 'echo "$GREETING:$OTHER:$PATH:$LOADEDMODULES"'
    result = probe(environment_lines(plan), show, environ=plan.submitter)
    greeting, _, rest = result.out.strip().partition(":")
    assert greeting == "one", result
    assert (f"{tmp_path}/other-bin" in rest) == (purge is False), result
    assert ("other/1" in rest) == (purge is False), result


def test_without_a_module_system(tmp_path: Path) -> None:
    """Hide every module system from the shell."""
    job = job_in(tmp_path / "p", environment__modules=["greet"], environment__setup=[])
    plan = plan_of(job, bare())
    text = "\n".join(environment_lines(plan))
    hidden = text.replace("/etc/profile.d/", "/nowhere/").replace("/usr/share/", "/nowhere/")
    result = probe([hidden], "true", environ=plan.submitter)
    assert result.failure is not None
    assert "there is no 'module' command on" in result.failure


def test_setup_lines_run_in_the_probe_and_can_detect_it(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    write_modules(tmp_path)
    brings = [
        f"export PYTHONPATH={packages}",
        '[ -n "$PACELINE_CHECK" ] || touch ran',
        "sleep 60 &",
        "echo '{}'",
    ]
    job = job_in(tmp_path / "p", IMPORTS_IT, environment__setup=brings)
    assert {each.level for each in check_program(job, plan_of(job, bare()))} == {GOOD}

    job = job_in(tmp_path / "p", IMPORTS_IT, environment__setup=["echo no GPU here >&2; exit 3"])
    (doubt,) = check_program(job, plan_of(job, bare()))
    assert doubt.level == WARNING
    assert "no GPU here" in doubt.text


def test_names_in_terse_listings() -> None:
    lmods = "/apps/modules:\ncuda/\ncuda/11.8\ncuda/12.4(default)\ngcc/13 <L>\n"
    theirs = "/apps/modules:\ncuda/11.8\ncuda/12.4(default)\n\n"
    assert available_names(lmods) == ["cuda/11.8", "cuda/12.4", "gcc/13"]
    assert available_names(theirs) == ["cuda/11.8", "cuda/12.4"]
