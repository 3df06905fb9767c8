"""`run.capture` without a GPU: the step runs as it is, and a note says why. With a GPU: tests/gpu/test_capture.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline


def test_on_the_cpu_the_step_runs_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    def losses(captured: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        with paceline.session(seed=0, cpu=True, report=False) as run:
            model = run.wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: torch.Tensor) -> float:
                """Train on a batch."""
                loss = (model(x) - 1).square().mean()
                run.backward(loss)
                run.update(optimizer)
                return loss.item() + run.step

            chosen = run.capture(step) if captured else step
            assert chosen.__doc__ == "Train on a batch."
            return [chosen(torch.full((8, 4), float(number))) for number in run.steps(range(6))]

    assert losses(captured=True) == losses(captured=False)
    assert (
        capfd.readouterr().err.count("run.capture: steps run eagerly, because the device is cpu")
        == 1
    )


def test_a_proof_sees_every_step(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        paceline.session(seed=0, cpu=True, report=False) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PACELINE_PROOF", "probe.json")
        for _ in run.steps(range(1)):
            run.capture(lambda: None)()
    assert (
        "run.capture: steps run eagerly, because `paceline prove` records" in capfd.readouterr().err
    )
