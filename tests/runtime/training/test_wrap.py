"""A wrapped model is the script's own object at every world size, and its gradients are those of one process."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import types
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline.errors import UsageError
from tests.forked_ranks import Ranks
from tests.runtime.models import Net, assert_close, data, net, weights


def quiet(**options: Any) -> paceline.session:
    return paceline.session(cpu=True, report=False, **options)


def plain_steps(steps: int = 5) -> list[float]:
    """What one process without any library arrives at."""
    model, (x, y) = net(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train(mode: str, how: str, compile: bool = False) -> tuple[str, list[str], int, list[float]]:
    x, y = data()
    with quiet() as run:
        share = len(x) // run.world_size
        mine = slice(run.rank * share, (run.rank + 1) * share)
        # Each rank begins with other weights: wrap must make them equal to rank 0's.
        model = run.wrap(
            net(seed=run.rank), mode=mode, compile={"backend": "eager"} if compile else False
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(5):
            if how == "method":
                loss = model.loss_by_method(x[mine], y[mine])
            else:
                loss = ((model(x[mine]) - y[mine]) ** 2).mean()
            if how == "plain":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                run.backward(loss)
                assert run.update(optimizer)
        return (
            type(model).__mro__[-3].__name__,
            list(model.state_dict()),
            model.width,
            weights(model),
        )


CASES = [("auto", "run"), ("auto", "plain"), ("auto", "method"), ("fsdp", "run"), ("fsdp", "plain")]


@pytest.mark.parametrize(("mode", "how"), CASES)
def test_two_ranks_train_as_one_process_does(ranks: Ranks, mode: str, how: str) -> None:
    expected = plain_steps()
    for _, keys, width, found in ranks(train, 2, mode, how):
        assert keys == list(net().state_dict())
        assert width == 8
        assert_close(found, expected)


class Nested(torch.nn.Module):
    """Lists of layers within a list of stages, and one layer that appears twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.nn.Linear(4, 4)
        stages = [torch.nn.ModuleList([torch.nn.Linear(4, 4), shared]) for _ in range(2)]
        self.stages = torch.nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x).tanh()
        return x.sum(1)


def train_nested(mode: str) -> list[float]:
    x, y = data()
    with quiet() as run:
        share = len(x) // run.world_size
        mine = slice(run.rank * share, (run.rank + 1) * share)
        torch.manual_seed(0)
        model = run.wrap(Nested().double(), mode=mode)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(3):
            run.backward(((model(x[mine]) - y[mine]) ** 2).mean())
            run.update(optimizer)
        return weights(model)


def test_lists_of_layers_within_lists_are_sharded(ranks: Ranks) -> None:
    expected = train_nested("none")
    for found in ranks(train_nested, 2, "fsdp"):
        assert_close(found, expected)


def test_one_process_is_the_same_model() -> None:
    for mode in ("auto", "ddp", "none", "fsdp"):
        _, keys, _, found = train(mode, "run")
        assert keys == list(net().state_dict())
        assert_close(found, plain_steps())


def compiled() -> tuple[list[str], list[float]]:
    _, keys, _, found = train("auto", "run", compile=True)
    return keys, found


def test_a_compiled_model_keeps_its_keys(ranks: Ranks) -> None:
    for world_size in (1, 2):
        for keys, found in ranks(compiled, world_size):
            assert keys == list(net().state_dict())
            assert_close(found, plain_steps())


def copies() -> dict[str, Any]:
    x, _ = data()
    with quiet() as run:
        model = run.wrap(net())
        assert type(model) is Net
        average = torch.optim.swa_utils.AveragedModel(model)
        twin = copy.deepcopy(model)
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        before = model(x).detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        changed = model(x).detach()
        alone = (
            model(x).detach() if run.rank == 0 and torch.set_grad_enabled(False) is None else None
        )
        torch.set_grad_enabled(True)
        return {
            "average": torch.equal(average(x), before),
            "twin": torch.equal(twin(x), before),
            "loaded": torch.equal(loaded(x), before),
            "moved": not torch.equal(changed, before),
            "alone": alone is None or torch.equal(alone, changed),
        }


def test_copies_of_a_wrapped_model_compute_by_themselves(ranks: Ranks) -> None:
    # The forward on rank 0 alone, without gradients, must not wait for rank 1.
    for found in ranks(copies, 2):
        assert all(found.values()), found


def patched_copies() -> list[bool]:
    """Patch a forward in the ways that libraries do, and compare copies with the model after it has changed."""

    def doubled(self: Net, x: torch.Tensor) -> torch.Tensor:
        return 2 * Net.forward(self, x)

    x, _ = data()
    found = []
    with quiet() as run:
        for patch in (types.MethodType, functools.partial):
            model: Any = net()
            model.forward = patch(doubled, model)  # type: ignore[operator]
            expected = model(x).detach()
            model = run.wrap(model)
            twin = copy.deepcopy(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            found += [
                torch.equal(each(x).detach(), expected)
                for each in (twin, twin, copy.deepcopy(twin))
            ]
            found.append(not torch.equal(model(x).detach(), expected))
    return found


def test_copies_keep_a_forward_that_was_patched(ranks: Ranks) -> None:
    assert ranks(patched_copies, 2) == [[True] * 8] * 2


def early_optimizer(mode: str) -> str:
    with quiet() as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = run.wrap(model, mode=mode)
        run.backward(model(data()[0]).sum())
        try:
            run.update(optimizer)
        except UsageError as error:
            return str(error)
        return "fine"


def test_an_optimizer_from_before_the_wrap_is_an_error_under_fsdp(ranks: Ranks) -> None:
    assert "from before run.wrap" in early_optimizer("fsdp")
    assert all("from before run.wrap" in found for found in ranks(early_optimizer, 2, "fsdp"))
    # DDP leaves the parameters what they are, and so does our wrap: nothing is wrong with it.
    assert ranks(early_optimizer, 2, "ddp") == ["fine", "fine"]


def stray_parameter() -> str:
    with quiet() as run:
        model = run.wrap(net())
        stray = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([*model.parameters(), stray], lr=0.1)
        run.backward(model(data()[0]).sum())
        with pytest.raises(UsageError) as error:
            run.update(optimizer)
        return str(error.value)


def test_a_parameter_that_no_wrapped_model_owns_would_drift(ranks: Ranks) -> None:
    assert all("(3,)" in found and "drift" in found for found in ranks(stray_parameter, 2))


def test_wrong_modes_and_double_wraps_are_errors() -> None:
    with quiet() as run:
        with pytest.raises(UsageError, match="deepspeed"):
            run.wrap(net(), mode="deepspeed")
        model = run.wrap(net())
        with pytest.raises(UsageError, match="already"):
            run.wrap(model)


# -- what inspects a model sees the script's own ---------------------------------------------------------


class Keywords(Net):
    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return super().forward(x) * scale


def inspections() -> dict[str, bool]:
    x, _ = data()
    with quiet() as run:
        torch.manual_seed(0)
        model = run.wrap(Keywords().double())
        with torch.no_grad():
            expected = model(x)
        holder = torch.nn.Sequential(model)  # a wrapped model within another
        exported = torch.export.export(model, (x,))
        traced = torch.fx.symbolic_trace(model)
        held = torch.fx.symbolic_trace(holder)
        return {
            "signature": inspect.signature(model.forward) == inspect.signature(Keywords().forward),
            "name": model.forward.__name__ == "forward" and model.forward.__self__ is model,
            "export": torch.equal(exported.module()(x), expected),
            "keys": set(exported.state_dict) == set(model.state_dict()),
            "trace": torch.equal(traced(x), expected),
            "trace within": torch.equal(held(x), expected),
        }


def test_tools_that_inspect_a_model_see_the_scripts_own(ranks: Ranks) -> None:
    for found in ranks(inspections, 2):
        assert all(found.values()), found


def generated() -> list[int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with quiet() as run:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=11,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=1,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = run.wrap(GPT2LMHeadModel(config))
        found: list[int] = model.generate(
            torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False
        )[0].tolist()
        return found


@pytest.mark.slow  # the signature is what it looks at, and tested above
def test_a_hugging_face_model_generates(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    expected = generated()
    assert len(expected) > 2
    assert ranks(generated, 2) == [expected] * 2


def rank_buffers(**options: Any) -> tuple[float, float]:
    """Return a buffer that differs between ranks, after an evaluation and a training step."""
    x, y = data()
    with quiet() as run:
        model = net()
        model.seen.fill_(float(run.rank))
        model = run.wrap(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.backward(((model(x) - y) ** 2).mean())
        run.update(optimizer)
        trained = model.seen.item()
        with torch.no_grad():
            for _ in run.evaluate(list(x), batch_size=64):
                pass
        return trained, model.seen.item()


def kept_buffers() -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return rank_buffers(broadcast_buffers=False)


def test_buffers_that_shall_not_be_broadcast_stay_as_they_are(ranks: Ranks) -> None:
    assert ranks(kept_buffers, 2) == [(0.0, 0.0), (1.0, 1.0)]
    assert ranks(rank_buffers, 2) == [(0.0, 0.0), (0.0, 0.0)]


def buffers_alone() -> list[float]:
    """Return the buffers of a model without parameters, after the wrap and before an evaluation."""
    with quiet() as run:
        model = torch.nn.BatchNorm1d(4, affine=False).double()
        model.running_mean.fill_(run.rank)  # type: ignore[union-attr, operator]
        model = run.wrap(model)
        found = [model.running_mean[0].item()]  # type: ignore[index]
        model(data()[0] + run.rank)
        for _ in run.evaluate(list(data()[0]), batch_size=64):
            found.append(model.running_mean[0].item())  # type: ignore[index]
        return found


def test_a_model_may_have_buffers_alone(ranks: Ranks) -> None:
    first, second = ranks(buffers_alone, 2)
    assert first == second
    assert first[0] == 0


def left_alone() -> tuple[float, float, list[float]]:
    """Let DDP ignore a layer and a buffer that differ between ranks."""
    x, y = data()
    with quiet(replica_check=1) as run:
        model: Any = net()
        model._ddp_params_and_buffers_to_ignore = ["layers.1.weight", "layers.1.bias", "seen"]
        model.seen.fill_(run.rank)
        with torch.no_grad():
            model.layers[1].bias.fill_(run.rank)
        model = run.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.backward(((model(x) - y) ** 2).mean())
        run.update(optimizer)
        for _ in run.evaluate(list(x), batch_size=64):
            pass
        return model.seen.item(), model.layers[1].bias.item(), weights(model.layers[0])


def test_what_ddp_shall_ignore_is_left_alone(ranks: Ranks) -> None:
    first, second = ranks(left_alone, 2)
    assert (first[0], second[0]) == (0.0, 1.0)
    assert abs(second[1] - first[1]) > 0.5
    assert first[2] == second[2]


# -- communication hooks ---------------------------------------------------------------------------------


def count_buckets(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
    state.append(bucket.buffer().numel())
    return default_hooks.allreduce_hook(None, bucket)


def with_hooks() -> tuple[list[list[float]], list[int]]:
    x, y = data()
    buckets: list[int] = []
    found = []
    with quiet() as run:
        share = slice(run.rank, None, run.world_size)
        for hook in (None, default_hooks.fp16_compress_hook, (buckets, count_buckets)):
            model = run.wrap(net().float(), comm_hook=hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                run.backward(((model(x[share].float()) - y[share]) ** 2).mean())
                run.update(optimizer)
            found.append(weights(model))
    return found, buckets


def test_gradients_are_communicated_as_the_hook_does(ranks: Ranks) -> None:
    for (plain, rounded, counted), buckets in ranks(with_hooks, 2):
        assert counted == plain
        assert sum(buckets) == 3 * 49
        assert rounded != plain
        assert_close(rounded, plain, atol=1e-2)
    alone, _ = with_hooks()  # with one rank, nothing is communicated
    assert alone == [alone[0]] * 3


def test_hooks_need_ddp() -> None:
    with quiet() as run, pytest.raises(UsageError, match="needs DDP"):
        run.wrap(net(), comm_hook=count_buckets, mode="fsdp")
