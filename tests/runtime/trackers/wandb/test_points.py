"""Points of a W&B sweep, requested by the real package from a fake server on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked_ranks import Ranks
from tests.runtime.trackers.wandb_runs import service_environment, shorten_agent_interval
from tests.runtime.trackers.wandb_server import wandb_service


def carry_out_points(count: int | None, fails: bool) -> list[tuple[str, dict[str, Any]]]:
    import wandb

    from paceline.runtime.trackers.wandb.points import Point, run_points

    shorten_agent_interval()
    seen = []

    def carry_out(point: Point) -> None:
        seen.append((point.variables["WANDB_RUN_ID"], point.values))
        with wandb.init() as run:
            assert dict(run.config) == point.values
            run.log({"loss": point.values["lr"] * 2})
        if fails:
            raise KeyError("no such column")

    sweep = wandb.sweep(
        {"method": "grid", "parameters": {"lr": {"values": [0.1, 0.2]}}}, project="digits"
    )
    if fails:
        with pytest.raises(KeyError, match="no such column"):
            run_points(sweep, carry_out, project="digits", count=count)
    else:
        run_points(sweep, carry_out, project="digits", count=count)
    return seen


def test_points_run_as_trials_of_the_sweep(ranks: Ranks, tmp_path: Path) -> None:
    with wandb_service([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]) as service:
        (seen,) = ranks(carry_out_points, 1, 2, False, env=service_environment(service, tmp_path))
        assert seen == [("trial-1", {"lr": 0.1}), ("trial-2", {"lr": 0.2})]
        assert [(each.sweep, each.exit_code) for each in service.runs.values()] == [
            ("sweep1", 0)
        ] * 2
        assert service.runs["trial-2"].history()[0]["loss"] == 0.4
        assert service.unanswered == []


def test_an_error_ends_the_agent_and_is_reported(ranks: Ranks, tmp_path: Path) -> None:
    with wandb_service([{"lr": 0.1}, {"lr": 0.2}]) as service:
        (seen,) = ranks(carry_out_points, 1, None, True, env=service_environment(service, tmp_path))
        assert len(seen) == 1
        assert len(service.points) == 1
