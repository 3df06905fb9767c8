"""New projects on a sandbox: `paceline submit` with no script trains them on two nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.tools.new.project import TEMPLATES, create_project
from tests.slurm.runs import Paceline, diagnostics, run_of
from tests.tools.new.test_project import RESULTS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_trains_on_two_nodes(
    template: str, tmp_path: Path, slurm_paceline: Paceline
) -> None:
    create_project("project", TEMPLATES[template], tmp_path)
    shape = ("--nodes", "2", "--nproc", "1", "--cpu", "--cpus-per-gpu", "1")
    done = slurm_paceline("submit", *shape, "--wait", cwd=tmp_path / "project", timeout=560)
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder)
    pattern, least, most = RESULTS[template]
    found = re.search(pattern, folder.attempt(1).log(0).read_text(encoding="utf-8"))
    assert found, diagnostics(folder)
    assert least < float(found[1]) <= most
