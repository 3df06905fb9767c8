"""`start_from`: a fresh run with the weights of another run, of a checkpoint or of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.checkpoint.manager import CheckpointManager
from paceline.runtime.checkpoint.safetensors import LENGTH
from tests.forked_ranks import Ranks
from tests.runtime.checkpoint.test_sharded import build, full
from tests.runtime.training.test_wrap import quiet


def net(out: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, out))


def same(first: nn.Module, second: nn.Module) -> bool:
    states = (first.state_dict(), second.state_dict())
    return all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def train(
    folder: Path, *, epochs: int = 1, model: nn.Module | None = None, **settings: Any
) -> dict[str, Any]:
    """Train two steps an epoch with a schedule; return what the run began with."""
    model = model or net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1)
    with quiet(folder=folder, **settings) as run:
        restored = run.resume(model=model, opt=opt, sched=sched)
        found = {
            "step": run.step,
            "lr": sched.get_last_lr()[0],
            "moments": len(opt.state),
            "restored": restored,
        }
        found["model"] = {key: value.clone() for key, value in model.state_dict().items()}
        for _ in run.epochs(epochs):
            for _ in run.steps(range(2)):
                run.backward(model(torch.randn(5, 3)).square().mean())
                run.update(opt)
                sched.step()
    return {**found, "trained": model}


def write_safetensors(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a file as other tools do."""
    names = {torch.float32: "F32", torch.int64: "I64"}
    table, data = {}, b""
    for key, tensor in state.items():
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        offsets = [len(data), len(data) + len(raw)]
        table[key] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(LENGTH.pack(len(header)) + header + data)


def test_weights_come_from_a_run_and_all_else_is_fresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(tmp_path / "a", epochs=2)
    second = train(tmp_path / "b", start_from=str(tmp_path / "a"), start_strict=False)
    assert same(first["trained"], net_of(second["model"]))
    assert (second["step"], second["lr"], second["moments"]) == (0, 0.1, 0)
    assert second["restored"].weights_only
    assert "started with the weights of 'model' from" in capsys.readouterr().err
    # Its own checkpoint comes first.
    again = train(tmp_path / "b", epochs=2, start_from=str(tmp_path / "a"))
    assert (again["step"], again["restored"].own) == (2, True)
    assert same(second["trained"], net_of(again["model"]))
    # Only on request does it continue the other run.
    continued = train(tmp_path / "c", epochs=3, start_from=str(tmp_path / "a"), start_continue=True)
    assert (continued["step"], continued["moments"]) == (4, len(list(net().parameters())))
    assert continued["lr"] < 0.001


def net_of(state: Mapping[str, torch.Tensor]) -> nn.Module:
    model = net()
    model.load_state_dict(state)
    return model


def test_weights_come_from_files(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save(state, tmp_path / "plain.pt")
    torch.save(
        {"model_state_dict": state, "optimizer": {"state": {}}, "epoch": 3}, tmp_path / "usual.pth"
    )
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "wrapped.bin")
    write_safetensors(tmp_path / "w.safetensors", state)
    for name in ("plain.pt", "usual.pth", "wrapped.bin", "w.safetensors"):
        found = train(tmp_path / f"run-{name}", start_from=str(tmp_path / name))
        assert same(net_of(state), net_of(found["model"])), name
        assert found["step"] == 0


class Tied(nn.Module):
    """Its output layer has the weights of its embedding, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x)))


def test_weights_come_from_a_folder_of_hugging_face(tmp_path: Path) -> None:
    """In several files, without the second name of a parameter that has two."""
    folder = tmp_path / "gpt"
    folder.mkdir()
    state = {key: value for key, value in Tied().state_dict().items() if key != "head.weight"}
    names = {key: f"model-0000{1 + key.startswith('inner')}-of-00002.safetensors" for key in state}
    for name in set(names.values()):
        write_safetensors(folder / name, {key: state[key] for key in state if names[key] == name})
    found = train(tmp_path / "run", model=Tied(), start_from=str(folder))
    assert all(torch.equal(found["model"][key], value) for key, value in state.items())
    assert torch.equal(found["model"]["head.weight"], state["embedding.weight"])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has only 1 of 2 files of weights"):
        train(tmp_path / "broken", model=Tied(), start_from=str(folder))
    write_safetensors(folder / "model.safetensors", state)
    assert train(tmp_path / "single", model=Tied(), start_from=str(folder))["step"] == 0


class Code:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not run",)


def test_what_cannot_be_loaded_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": Code()}, tmp_path / "code.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    torch.save(net(out=7).state_dict(), tmp_path / "other.pt")
    (tmp_path / "model.onnx").touch()
    cases = {
        "code.pt": "Cannot load the weights",
        "empty.pt": "holds no weights",
        "model.onnx": "Cannot load the weights",
        "other.pt": "(?s)doesn't fit 'model': .*size mismatch for 2.weight",
        "missing": "no complete",
    }
    for name, text in cases.items():
        with pytest.raises(CheckpointError, match=text):
            train(tmp_path / f"run-{name}", start_from=str(tmp_path / name))
    assert "must not run" not in capsys.readouterr().out
    found = train(tmp_path / "part", start_from=str(tmp_path / "other.pt"), start_strict=False)
    assert torch.equal(found["model"]["0.weight"], torch.load(tmp_path / "other.pt")["0.weight"])
    assert "'model' is loaded only partially; wrong shape: '2.weight'" in capsys.readouterr().err
    with pytest.raises(UsageError, match="start_continue needs start_from"):
        train(tmp_path / "d", start_continue=True)
    with (
        pytest.raises(UsageError, match="needs a folder"),
        quiet(start_from=str(tmp_path / "other.pt")) as run,
    ):
        run.resume(model=net())


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02.",  # takes a value from an empty stack
        b"PK\x03\x04",
    ],
)
def test_a_damaged_file_is_explained(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"Cannot load the weights in .*weights\.pt: "
    ) as caught:
        load(tmp_path, tmp_path / "weights.pt", model=net())
    assert "It must be complete" in caught.value.hint


def test_a_whole_model_is_refused_in_our_own_words(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content in (net(), {"model": net().state_dict(), "where": tmp_path}):
        torch.save(content, path)
        with pytest.raises(
            CheckpointError, match=r"Cannot load the weights in .*model\.pt"
        ) as caught:
            load(tmp_path, path, model=net())
        assert "torch.save(model.state_dict(), ...)" in caught.value.hint
        assert "weights_only=False" not in f"{caught.value.message} {caught.value.hint}"


def load(tmp_path: Path, source: Path, *, strict: bool = True, **objects: Any) -> list[str]:
    warnings: list[str] = []
    manager = CheckpointManager(tmp_path / "target", warn=warnings.append)
    manager.register(**objects)
    try:
        manager.restore(source, weights_only=True, strict=strict)
    finally:
        manager.close()
    return warnings


def test_modules_are_matched_by_name_or_by_their_keys(tmp_path: Path) -> None:
    generator, critic = net(), nn.Linear(2, 1)
    manager = CheckpointManager(tmp_path / "source")
    manager.register(generator=generator, critic=critic, opt=torch.optim.SGD(critic.parameters()))
    manager.save(1, wait=True)
    manager.close()
    # Under another name, with averaged weights besides it; the model that the source lacks is named.
    model, new = net(), nn.Linear(9, 9)
    ema = AveragedModel(model)
    before = new.weight.clone()
    warnings = load(tmp_path, tmp_path / "source", model=model, ema=ema, new=new)
    assert same(generator, model)
    assert same(generator, ema.module)
    assert torch.equal(new.weight, before)
    assert "started with the weights of 'model', 'ema' from" in warnings[0]
    assert warnings[1] == "no weights for 'new' there: keeping the initial values"
    with pytest.raises(
        CheckpointError, match="has weights for 'generator', 'critic', but not for 'new'"
    ):
        load(tmp_path, tmp_path / "source", new=new)


def test_a_run_with_nothing_left_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, epochs=2)
    assert "nothing was left" not in capsys.readouterr().err
    train(tmp_path, epochs=2)
    assert (
        "nothing was left to do: step 4 was already the last one (epoch 2)"
        in capsys.readouterr().err
    )
    assert '"nothing_left"' in "".join(
        path.read_text() for path in (tmp_path / "events").glob("*.jsonl")
    )
    train(tmp_path, epochs=3)
    assert "nothing was left" not in capsys.readouterr().err


def start(folder: Path, sources: list[Path], sharded: bool, save: bool) -> list[dict[str, Any]]:
    """Save a source, if asked to, and start from each one; return the weights."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if world_size > 1 else None
    found = []
    for number, source in enumerate([None, *sources] if save else sources):
        model, optimizer = build(world_size, sharded=sharded)
        target = folder / str(number) if source else sources[0]
        manager = CheckpointManager(target, rank=rank, world_size=world_size, group=group)
        manager.register(model=model, opt=optimizer)
        manager.restore(source, weights_only=True)
        if source is None:
            fill(model)
            manager.save(1, wait=True)
        found.append({key: full(value) for key, value in model.state_dict().items()})
        manager.close()
    dist.destroy_process_group()
    return found


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.fill_(number)


def test_sharded_models_start_from_any_source(ranks: Ranks, tmp_path: Path) -> None:
    model = build(1, sharded=False)[0]
    fill(model)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    manager = CheckpointManager(tmp_path / "plain")
    manager.register(model=model)
    manager.save(1, wait=True)
    manager.close()
    expected = {key: full(each) for key, each in model.state_dict().items()}
    sources = [tmp_path / "sharded", tmp_path / "plain", tmp_path / "w.pt"]
    for found in ranks(start, 2, tmp_path / "two", sources, True, True):
        assert found == [expected] * 4
    assert ranks(start, 1, tmp_path / "one", sources, False, False) == [[expected] * 3]
