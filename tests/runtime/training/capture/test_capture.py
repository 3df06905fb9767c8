"""`run.capture` without a GPU: the step runs as it is, and a note says why. With a GPU: tests/gpu/test_capture.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.runtime.training.capture.fused_update import CompiledUpdate, has_fused_kernel
from paceline.runtime.training.capture.model_modes import ModelModes


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
            if captured:
                run.capture(lambda: None)()  # for the same reason, which is said once
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


def trained(
    optimizer: type[torch.optim.Optimizer], update: bool, **options: Any
) -> tuple[list[torch.Tensor], bool]:
    """Train for a few steps. Returns the weights, and whether the compiled update was used."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    chosen = optimizer(model.parameters(), **options)
    compiled = CompiledUpdate.of(chosen) if update else None
    for number in range(4):
        model(torch.full((8, 4), float(number))).square().mean().backward()
        if compiled is not None:
            compiled.install()
        try:
            chosen.step()
        finally:
            if compiled is not None:
                compiled.remove()
        chosen.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], compiled is not None


@pytest.mark.parametrize("name", ["Adadelta", "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD"])
def test_a_compiled_update_is_the_optimizers_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compile(function: Any, **options: Any) -> Any:
        return lambda *args, **kwargs: calls.append(function.__name__) or function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    optimizer = getattr(torch.optim, name)
    plain, _ = trained(optimizer, False)
    weights, is_compiled = trained(optimizer, True)
    assert is_compiled
    assert calls == [name.lower()] * 4  # and not in the steps that follow
    trained(optimizer, False)
    assert len(calls) == 4
    assert all(torch.equal(one, two) for one, two in zip(plain, weights, strict=True))


def test_an_update_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch._dynamo.exc.TorchDynamoException("no compiler here")

    plain, _ = trained(torch.optim.Adadelta, False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    weights, _ = trained(torch.optim.Adadelta, True)
    assert all(torch.equal(one, two) for one, two in zip(plain, weights, strict=True))
    assert (
        capfd.readouterr().err.count(
            "adadelta is not compiled, because that failed: no compiler here"
        )
        == 1
    )


class Mine(torch.optim.Adadelta):
    """An optimizer of the script."""


def test_only_updates_that_gain_from_it_are_compiled() -> None:
    def of(
        kind: Any, *, dtype: torch.dtype = torch.float32, tensors: int = 2, **options: Any
    ) -> Any:
        return CompiledUpdate.of(
            kind([torch.zeros(2, dtype=dtype) for _ in range(tensors)], lr=0.1, **options)
        )

    assert of(torch.optim.Adadelta) is not None
    assert of(Mine) is None
    assert of(torch.optim.AdamW) is None  # which has a fused kernel
    assert of(torch.optim.SGD) is None
    assert of(torch.optim.Adadelta, foreach=False) is None
    assert of(torch.optim.Adadelta, dtype=torch.bfloat16) is None
    assert of(torch.optim.Adadelta, tensors=101) is None


def test_adam_is_fused_unless_the_script_has_chosen() -> None:
    def fuses(kind: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> bool:
        optimizer = kind([torch.zeros(2, dtype=dtype)], lr=0.1, **options)
        return has_fused_kernel(optimizer, optimizer.param_groups[0])

    assert fuses(torch.optim.AdamW)
    assert fuses(torch.optim.Adam, amsgrad=True)
    assert not fuses(torch.optim.AdamW, foreach=True)
    assert not fuses(torch.optim.AdamW, fused=False)
    assert not fuses(torch.optim.AdamW, differentiable=True)
    assert not fuses(torch.optim.AdamW, dtype=torch.complex64)
    assert fuses(torch.optim.AdamW, dtype=torch.float64)
    assert not fuses(torch.optim.AdamW, dtype=torch.bfloat16)  # whose separate operations round
    assert not fuses(torch.optim.NAdam)


def make_blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))


MODE_CHANGES: dict[str, Any] = {
    "eval of all": lambda model: model.eval(),
    "eval of one": lambda model: model[1][0].eval(),
    "attribute": lambda model: setattr(model[1][1], "training", False),
    "frozen": lambda model: model[1][0].weight.requires_grad_(False),
}


@pytest.mark.parametrize("change", MODE_CHANGES)
def test_a_graph_depends_on_the_mode_of_every_module(change: str) -> None:
    model = make_blocks()
    modes = ModelModes([model])
    before = modes.key()
    assert modes.key() == before
    MODE_CHANGES[change](model)
    assert not modes.has_changed(1)
    assert modes.key() != before
    model.train().requires_grad_(True)
    assert modes.key() == before


PART_CHANGES: dict[str, Any] = {
    "replaced": lambda model: setattr(model[1], "1", nn.Dropout()),
    "removed": lambda model: model[1].pop(1),
    "removed in front": lambda model: model.__delitem__(0),
    "appended": lambda model: model[1].append(nn.Dropout()),
    "inserted": lambda model: model.insert(0, nn.Dropout()),
    "inside a leaf": lambda model: model[1][1].add_module("other", nn.Dropout()),
    "no module": lambda model: setattr(model[1], "1", None),
}


@pytest.mark.parametrize("change", PART_CHANGES)
def test_a_graph_is_not_used_for_other_modules(change: str) -> None:
    model = make_blocks()
    modes = ModelModes([model])
    assert not modes.has_changed(1)
    assert modes.has_changed(2)
    PART_CHANGES[change](model)
    assert modes.has_changed(1)
    assert not ModelModes([model]).has_changed(1)
