"""Runs the cases of a proof on ranks that are forked from one process, which has torch imported."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.rank_records import ProofSpec
from paceline.contract.run_folder import RunFolder
from paceline.tools.prove.local_runner import Script, make_spec
from paceline.tools.prove.records import Case, CaseRecords, read_ranks
from tests.forked_ranks import Ranks

HERE = Path(__file__).parent


def run_script(script: str, args: Sequence[str]) -> str:
    """Be a rank as `agent.workers.bootstrap` makes it. Returns what the script prints."""
    from paceline.runtime.proof.patches import start_recorder

    sys.argv = [script, *args]
    recorder, printed = start_recorder(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code:
                raise
    recorder.end_at_exit()
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return printed.getvalue()


class ForkedRunner:
    """What `LocalRunner` does, without agents."""

    def __init__(self, ranks: Ranks, folder: Path, script: Script) -> None:
        self.ranks, self.folder, self.script = ranks, folder, script
        self.names: list[str] = []

    def run(self, case: Case, against: Case | None) -> CaseRecords:
        self.names.append(case.name)
        own = self.folder / case.slug
        own.mkdir(parents=True)
        spec = make_spec(case, own, None if against is None else self.folder / against.slug)
        self._launch(case, own, spec)
        stopped_after = 0
        if case.interrupted:
            stopped_after = max(read_ranks(own, 1)[0].steps)
            assert stopped_after < case.steps
            self._launch(case, own, replace(spec, stop_at=0))
        return CaseRecords(case, read_ranks(own, case.ranks), "", stopped_after)

    def _launch(self, case: Case, own: Path, spec: ProofSpec) -> str:
        path, program, args = (
            own / "probe.json",
            self.script.program.name,
            self.script.arguments(case, own),
        )
        path.write_text(spec.to_json(), encoding="utf-8")
        launch = LaunchSpec(
            "run",
            program,
            list(args),
            nproc=case.ranks,
            check=False,
            runtime={"max_steps": case.steps},
        )
        RunFolder(own).launch_spec.write_text(json.dumps(asdict(launch)), encoding="utf-8")
        variables = {env.RUN: str(own), env.PROOF: str(path)}
        outputs = self.ranks(
            run_script, case.ranks, str(HERE / program), args, env={**os.environ, **variables}
        )
        return str(outputs[0])
