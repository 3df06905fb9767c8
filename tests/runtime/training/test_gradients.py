"""From loss to step: accumulation, several optimizers, clipping, precision, and losses that are not numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import NonFinite, UsageError
from tests.forked_ranks import Ranks
from tests.runtime.models import assert_close, data, net, weights
from tests.runtime.training.test_wrap import quiet


def accumulated(accumulate: int, by_sum: bool) -> tuple[list[float], int, list[bool]]:
    """Training on 60 samples in batches of 16: the last one is a tail of 12."""
    x, y = data(60)
    moved = []
    with quiet(seed=0) as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(
            TensorDataset(x, y), batch_size=16, accumulate=accumulate, drop_last=False
        )
        for _ in run.epochs(2):
            for a, b in run.steps(loader):
                squares = (model(a) - b) ** 2
                if by_sum:
                    run.backward(squares.sum(), weight=len(b))
                else:
                    run.backward(squares.mean())
                moved.append(run.update(optimizer, clip=0.5))
        return weights(model), run.step, moved


@pytest.mark.parametrize("by_sum", [False, True])
def test_micro_steps_and_ranks_and_tails_add_up_to_the_same_step(
    ranks: Ranks, by_sum: bool
) -> None:
    expected, steps, moved = accumulated(1, by_sum)
    assert steps == 8
    assert all(moved)
    for world_size, accumulate in ((1, 4), (2, 1), (2, 2)):
        for found, steps, moved in ranks(accumulated, world_size, accumulate, by_sum):
            assert steps == 8
            assert moved == [step % accumulate == accumulate - 1 for step in range(8 * accumulate)]
            assert_close(found, expected)


def plain_tail(samples: int, plain_step: bool) -> tuple[int, str]:
    """Return the number of steps before an error, and the error."""
    steps, x = 0, data()[0][:samples]
    with quiet() as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(
            TensorDataset(x), batch_size=4, shuffle=False, drop_last=False, num_workers=0
        )
        for (part,) in run.steps(loader):
            model(part).mean().backward()
            try:
                if plain_step:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    run.update(optimizer)
            except UsageError as error:
                return steps, error.message
            steps += 1
    return steps, "fine"


def all_plain_tails() -> list[tuple[int, str]]:
    return [plain_tail(11, False), plain_tail(11, True), plain_tail(10, True), plain_tail(9, False)]


def test_plain_calls_with_slices_of_different_sizes_are_errors(ranks: Ranks) -> None:
    message = "The gradients come from loss.backward(), but ranks have different numbers of samples in this step."
    expected = [(2, message), (2, message), (3, "fine"), (2, message)]
    assert ranks(all_plain_tails, 2) == [expected] * 2
    assert plain_tail(11, True) == (3, "fine")


def gan_by_hand(first: str) -> list[float]:
    generator, critic, (x, _) = _gan_networks()
    opt_g = torch.optim.Adam(generator.parameters(), lr=0.02)
    opt_c = torch.optim.Adam(critic.parameters(), lr=0.02)
    for _ in range(6):
        for turn in (first, "c" if first == "g" else "g"):
            opt_c.zero_grad()
            opt_g.zero_grad()
            if turn == "c":
                (critic(generator(x).detach()).mean() - critic(x).mean()).backward()
                opt_c.step()
            else:
                (-critic(generator(x)).mean()).backward()
                opt_g.step()
    return weights(generator, critic)


def _gan_networks() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return generator, critic, data()


def _wrapped_gan(
    run: paceline.Run, kind: type[torch.optim.Adam] | type[torch.optim.SGD]
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer, torch.Tensor]:
    """Return both networks with an optimizer each, and the samples of this rank."""
    generator, critic, (x, _) = _gan_networks()
    generator, critic = run.wrap(generator), run.wrap(critic)
    opt_g, opt_c = (kind(each.parameters(), lr=0.02) for each in (generator, critic))
    return generator, critic, opt_g, opt_c, x[run.rank :: run.world_size]


def gan_by_run(first: str) -> list[float]:
    with quiet() as run:
        generator, critic, opt_g, opt_c, mine = _wrapped_gan(run, torch.optim.Adam)
        for _ in run.steps([None] * 6):
            for turn in (first, "c" if first == "g" else "g"):
                if turn == "c":
                    run.backward(critic(generator(mine).detach()).mean() - critic(mine).mean())
                    run.update(opt_c)
                else:
                    run.backward(-critic(generator(mine)).mean())
                    run.update(opt_g)
        return weights(generator, critic)


@pytest.mark.parametrize("first", ["c", "g"])
def test_two_networks_with_a_loss_each(ranks: Ranks, first: str) -> None:
    # The generator's loss leaves gradients in the critic: they must not reach the critic's own step.
    expected = gan_by_hand(first)
    for world_size in (1, 2):
        for found in ranks(gan_by_run, world_size, first):
            assert_close(found, expected)


def rare_by_hand(steps: int) -> list[float]:
    model, (x, y) = net(), data()
    often, rarely = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers)
    for step in range(steps):
        ((model(x) - y) ** 2).mean().backward()
        for optimizer in (often, rarely) if step % 4 == 3 else (often,):
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def rare_by_run(by_hand: bool, by_method: bool) -> list[float]:
    x, y = data()
    with quiet() as run:
        mine = slice(run.rank, None, run.world_size)
        model = run.wrap(net())
        often, rarely = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers)

        def step(number: int) -> None:
            loss = model.loss_by_method if by_method else lambda a, b: ((model(a) - b) ** 2).mean()
            run.backward(loss(x[mine], y[mine]))
            run.update(often)
            if number % 4 == 3:
                run.update(rarely)

        if by_hand:
            for number in range(8):
                step(number)
                assert not run.should_stop
        else:
            for number in run.steps(range(8)):
                step(number)
        return weights(model)


def all_rare() -> list[list[float]]:
    return [
        rare_by_run(by_hand, by_method) for by_hand in (False, True) for by_method in (False, True)
    ]


def test_an_optimizer_that_skips_steps_gets_the_gradients_of_all_of_them(ranks: Ranks) -> None:
    for world_size in (1, 2):
        for results in ranks(all_rare, world_size):
            for found in results:
                assert_close(found, rare_by_hand(8))


def two_losses(order: str, by_hand: bool) -> list[float]:
    """Two networks with a loss each, in any order; the second is updated in every fourth step."""
    (x, y), first, second = data(), net(), net()
    with quiet() as run:
        if not by_hand:
            run.wrap(first)
            run.wrap(second)
        mine = slice(run.rank, None, run.world_size) if not by_hand else slice(None)
        models = {"a": first, "b": second}
        optimizers = {
            "A": torch.optim.SGD(first.parameters(), lr=0.1),
            "B": torch.optim.SGD(second.parameters(), lr=0.1),
        }
        for step in run.steps(range(8)):
            for turn in order:
                if turn == "B" and step % 4 != 3:
                    continue
                if turn in models:
                    loss = ((models[turn](x[mine]) - y[mine]) ** 2).mean()
                    loss.backward() if by_hand else run.backward(loss)
                elif by_hand:
                    optimizers[turn].step()
                    optimizers[turn].zero_grad()
                else:
                    run.update(optimizers[turn])
        return weights(first, second)


ORDERS = ("aAbB", "abAB", "baAB", "bBaA")


def all_two_losses() -> list[list[float]]:
    return [two_losses(order, by_hand=False) for order in ORDERS]


def test_an_optimizer_that_skips_steps_keeps_its_gradients_in_any_order(ranks: Ranks) -> None:
    expected = [two_losses(order, by_hand=True) for order in ORDERS]
    for world_size in (1, 2):
        for results in ranks(all_two_losses, world_size):
            for found, wanted in zip(results, expected, strict=True):
                assert_close(found, wanted)


def test_a_checkpoint_without_gradients_that_wait_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for every, plain in ((1, False), (4, False), (1, True)):
        with quiet(folder=tmp_path / f"{every}-{plain}", save_every_steps=every) as run:
            model = run.wrap(net())
            often, rarely = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers)
            run.resume(model=model)
            for step in run.steps(range(8)):
                loss = model(data()[0]).mean()
                if plain:
                    loss.backward()
                    often.step()  # the script clears its gradients at some other time
                    rarely.step()
                else:
                    run.backward(loss)
                    for optimizer in (often, rarely) if step % 4 == 3 else (often,):
                        run.update(optimizer)
        said = capfd.readouterr().err.count(
            "2 parameters, such as layers.1.weight, have gradients that wait"
        )
        assert said == (every == 1 and not plain)


def rare_critic(first: str, by_hand: bool) -> list[float]:
    """A GAN whose critic steps in every third step only."""
    generator, critic, (x, _) = _gan_networks()
    with quiet() as run:
        generator, critic = run.wrap(generator), run.wrap(critic)
        opt_g = torch.optim.Adam(generator.parameters(), lr=0.02)
        opt_c = torch.optim.Adam(critic.parameters(), lr=0.02)
        for step in run.steps(range(6)):
            for turn in first if step % 3 == 0 else "g":
                loss = (
                    critic(generator(x).detach()) - critic(x)
                    if turn == "c"
                    else -critic(generator(x))
                )
                run.backward(loss.mean())
                run.update({"c": opt_c, "g": opt_g}[turn])
                if by_hand:
                    opt_c.zero_grad()
                    opt_g.zero_grad()
        return weights(generator, critic)


def test_a_critic_that_skips_steps() -> None:
    assert_close(rare_critic("gc", by_hand=False), rare_critic("gc", by_hand=True), atol=0)


def test_one_loss_with_two_optimizers() -> None:
    def halves(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers]

    x, y = data()
    by_hand = net()
    optimizers = halves(by_hand)
    for _ in range(3):
        ((by_hand(x) - y) ** 2).mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    with quiet() as run:
        model = run.wrap(net())
        optimizers = halves(model)
        for _ in run.steps(range(3)):
            run.backward(((model(x) - y) ** 2).mean())
            for each in optimizers:
                run.update(each)
    assert_close(weights(model), weights(by_hand), atol=0)


def test_parameters_that_join_an_optimizer_later_are_clipped_too() -> None:
    with quiet() as run:
        model = run.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
        for late in (False, True):
            if late:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            before = model[1].weight.detach().clone()
            run.backward(1e4 * model(torch.ones(1, 2)).sum())
            run.update(optimizer, clip=1e-3)
        moved = (model[1].weight.detach() - before).abs().max().item()
        assert 0 < moved <= 1.1e-3


# -- weights ---------------------------------------------------------------------------------------------

VOCABULARY = 7


def sentences(count: int = 22) -> list[torch.Tensor]:
    """Token numbers; those from a random length on are padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (count, 6), generator=generator)
    lengths = torch.randint(2, 7, (count, 1), generator=generator)
    return list(tokens.masked_fill(torch.arange(6) >= lengths, 0))


def language_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)).double()


def sum_of_tokens(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
    return loss, (targets != 0).sum()


def tokens_by_hand(clip: float) -> list[float]:
    model = language_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    everything = torch.stack(sentences())
    for _ in range(2):
        for start in range(0, 22, 8):  # the last batch has 6 sentences
            loss, count = sum_of_tokens(model, everything[start : start + 8])
            (loss / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def tokens_by_run(accumulate: int, clip: float, of_the_loader: bool) -> list[float]:
    everything = sentences()
    with quiet(seed=0) as run:
        model = run.wrap(language_model())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        loader: Any = run.loader(
            everything, batch_size=8, accumulate=accumulate, shuffle=False, drop_last=False
        )
        if not of_the_loader:  # the same batches, of which Paceline knows nothing
            micros = [micro.data for micro in loader.micro_batches(0)]
            assert len(micros) == 3 * accumulate
        for _ in run.epochs(2):
            for tokens in (
                run.steps(loader) if of_the_loader else run.steps(micros, accumulate=accumulate)
            ):
                loss, count = sum_of_tokens(model, tokens)
                run.backward(loss, weight=count if accumulate == 1 else count.item())
                run.update(optimizer, clip=clip)
        return weights(model)


def all_tokens_by_run() -> list[list[float]]:
    return [tokens_by_run(accumulate, 0.3, of_the_loader=True) for accumulate in (1, 2)]


def test_weights_give_the_mean_over_all_tokens_of_a_step(ranks: Ranks) -> None:
    expected = tokens_by_hand(0.3)
    assert_close(tokens_by_run(2, 0.3, of_the_loader=False), expected)
    for world_size in (1, 2, 4):
        for results in ranks(all_tokens_by_run, world_size):
            for found in results:
                assert_close(found, expected)


def weighted_gan(accumulate: int) -> list[float]:
    """Two networks with a weighted loss each, and unlike weights."""
    with quiet() as run:
        generator, critic, opt_g, opt_c, samples = _wrapped_gan(run, torch.optim.SGD)
        mine = samples.chunk(accumulate)
        for part in run.steps([*mine, *mine], accumulate=accumulate):
            critic.requires_grad_(True)
            run.backward(
                critic(generator(part).detach()).sum() - critic(part).sum(), weight=2 * len(part)
            )
            run.update(opt_c)
            critic.requires_grad_(False)
            run.backward(-critic(generator(part)).sum(), weight=len(part))
            run.update(opt_g)
        return weights(generator, critic)


def all_weighted_gans() -> list[list[float]]:
    return [weighted_gan(accumulate) for accumulate in (1, 2)]


def weighted_gan_by_hand(accumulate: int) -> list[float]:
    generator, critic, (x, _) = _gan_networks()
    opt_g, opt_c = (torch.optim.SGD(each.parameters(), lr=0.02) for each in (generator, critic))
    for part in x.chunk(accumulate) * 2:
        last = torch.equal(part[-1], x[-1])
        critic.requires_grad_(True)
        ((critic(generator(part).detach()).sum() - critic(part).sum()) / (2 * len(x))).backward()
        if last:
            opt_c.step()
            opt_c.zero_grad()
        critic.requires_grad_(False)
        (-critic(generator(part)).sum() / len(x)).backward()
        if last:
            opt_g.step()
            opt_g.zero_grad()
    return weights(generator, critic)


def test_each_update_divides_by_the_weights_of_its_own_losses(ranks: Ranks) -> None:
    for world_size in (1, 2):
        for alone, accumulated in ranks(all_weighted_gans, world_size):
            assert_close(alone, weighted_gan_by_hand(1))
            assert_close(accumulated, weighted_gan_by_hand(2))


def one_weighted_update(
    run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    for _ in run.steps(range(1)):
        run.backward(model(data()[0]).sum(), weight=64)
        run.update(optimizer)


def test_weights_that_cannot_be_right_are_errors() -> None:
    x, _ = data()
    with quiet() as run:
        model = run.wrap(net())
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers)
        with pytest.raises(UsageError, match="weight is a str"):
            run.backward(model(x).sum(), weight="64")  # type: ignore[arg-type]
        run.backward(model(x).sum(), weight=64)
        with pytest.raises(UsageError, match="others do not"):
            run.backward(model(x).mean())
        with pytest.raises(UsageError, match="not yet divided by their weights"):
            first.step()
        with pytest.raises(UsageError, match=r"layers\.1\.weight has gradients"):
            one_weighted_update(run, model, first)
        second.zero_grad()
        run.backward(model(x).mean())
        with pytest.raises(UsageError, match="others do not"):
            run.backward(model(x).sum(), weight=64)


@pytest.mark.parametrize("weighted_first", [False, True])
def test_all_micro_steps_of_an_update_have_weights_or_none(weighted_first: bool) -> None:
    x, _ = data()
    with quiet() as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in run.steps(range(7), accumulate=2):
            if i < 4:  # a whole step without weights, and one with them
                run.backward(
                    model(x).mean() if i < 2 else model(x).sum(), weight=None if i < 2 else 64
                )
            elif i % 2 == 0:
                run.backward(model(x).sum(), weight=64 if weighted_first else None)
            else:
                with pytest.raises(UsageError, match="others do not"):
                    run.backward(model(x).sum(), weight=None if weighted_first else 64)
                break
            run.update(optimizer)
        else:
            pytest.fail("the loop ended early")


def without_a_loss(weight: int | None) -> list[float]:
    """Rank 1 has no loss in each second step, or one that weighs nothing."""
    x, y = data()
    with quiet() as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in run.steps(range(4)):
            part = slice(run.rank, None, 2) if i % 2 == 0 else slice(None)
            if run.rank == 0 or i % 2 == 0:
                count = len(x[part])
                run.backward(model.loss_by_method(x[part], y[part]) * count, weight=count)
            elif weight is not None:
                run.backward(0.0 * model.loss_by_method(x, y), weight=weight)
            run.update(optimizer)
        return weights(model)


def all_without_a_loss() -> list[list[float]]:
    return [without_a_loss(None), without_a_loss(0)]


def test_a_rank_without_a_loss_adds_nothing_to_the_weights(ranks: Ranks) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model.loss_by_method(*data()).backward()
        optimizer.step()
    for found in ranks(all_without_a_loss, 2):
        for each in found:
            assert_close(each, weights(model))


def joined_later(by_hand: bool) -> list[float]:
    """The discriminator is wrapped after the first update of the generator."""
    x, _ = data()
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    with quiet() as run:
        run.wrap(generator)
        first = torch.optim.SGD(generator.parameters(), lr=0.1)
        run.backward(generator(x).square().mean())
        run.update(first)
        run.wrap(discriminator)
        second = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        for _ in run.steps(range(3)):
            run.backward(-discriminator(generator(x)).mean())
            run.update(first)
            if by_hand:
                second.zero_grad()
            run.backward(discriminator(x).square().mean())
            run.update(second)
            if by_hand:
                first.zero_grad()
        return weights(generator, discriminator)


def test_a_model_that_is_wrapped_later() -> None:
    assert joined_later(by_hand=False) == joined_later(by_hand=True)


# -- optimizers that wrap another one ----------------------------------------------------------------------


class Outer(torch.optim.Optimizer):
    """As Lookahead does, it leaves the step to another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_optimizers_may_wrap_another_one(precision: str) -> None:
    x = data()[0].float()
    found = []
    for is_wrapped in (True, False):
        with quiet(precision=precision) as run:
            model = run.wrap(net().float())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = Outer(inner) if is_wrapped else inner
            for _ in run.steps(range(2)):
                run.backward(model(x).sum(), weight=64)
                assert run.update(optimizer)
            found.append(weights(model))
    assert found[0] == found[1]


# -- closures --------------------------------------------------------------------------------------------


def by_lbfgs(how: str) -> list[float]:
    x, y = data()
    with quiet() as run:
        mine = slice(run.rank, None, run.world_size)
        model = run.wrap(net())
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            if how == "method":
                loss = model.loss_by_method(x[mine], y[mine])
                run.backward(loss)
                return loss
            squares = (model(x[mine]) - y[mine]) ** 2
            loss = squares.sum() if how == "sum" else squares.mean()
            run.backward(loss, weight=len(squares) if how == "sum" else None)
            return loss

        for _ in run.steps(range(3)):
            assert run.update(optimizer, closure=closure)
        return weights(model)


def all_by_lbfgs() -> list[list[float]]:
    return [by_lbfgs(how) for how in ("forward", "method", "sum")]


def test_closures_are_evaluated_over_all_ranks(ranks: Ranks) -> None:
    model, (x, y) = net(), data()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    for world_size in (1, 2):
        for results in ranks(all_by_lbfgs, world_size):
            for found in results:
                assert_close(found, weights(model), atol=1e-9)


def test_closures_that_cannot_work_are_errors() -> None:
    with quiet() as run:
        model = run.wrap(net())
        optimizer = torch.optim.LBFGS(model.parameters())
        for _ in run.steps(range(2), accumulate=2):
            with pytest.raises(UsageError, match="neither with accumulate"):
                run.update(optimizer, closure=lambda: model(data()[0]).mean())
        with pytest.raises(UsageError, match="return loss"):
            run.update(optimizer, closure=lambda: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_and_keeps_full_weights(precision: str) -> None:
    x, y = (each.float() for each in data())
    with quiet(seed=0, precision=precision) as run:
        model = run.wrap(net().float())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        losses = []
        for _ in run.steps(range(60)):
            with run.autocast():
                out = model(x)
            assert out.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
            loss = ((out.float() - y) ** 2).mean()
            run.backward(loss)
            run.update(optimizer, clip=1.0)
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def skipped_by_the_scaler() -> list[bool]:
    x, y = (each.float() for each in data())
    with quiet(precision="fp16") as run:
        model = run.wrap(net().float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepped = []
        for factor in run.steps([1.0, torch.inf, 1.0]):
            before = weights(model)
            run.backward(((model(x) - y) ** 2).mean() * (factor if run.rank == 0 else 1.0))
            stepped.append(run.update(optimizer))
            assert (weights(model) != before) == stepped[-1]
        return stepped


def test_an_update_that_the_scaler_skips_says_so(ranks: Ranks) -> None:
    assert skipped_by_the_scaler() == [True, False, True]
    assert ranks(skipped_by_the_scaler, 2) == [[True, False, True]] * 2


@pytest.mark.parametrize("loop", [True, False])
def test_gradients_that_wait_follow_the_scale(loop: bool) -> None:
    x = data()[0].float()
    with quiet(precision="fp16", on_nonfinite="ignore") as run:
        models = [run.wrap(net().float()) for _ in range(2)]
        often, seldom = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        expected = net().float()
        for i in run.steps(range(4)) if loop else range(4):
            run.backward(models[1](x).square().mean())
            expected(x).square().mean().backward()
            loss = models[0](x).mean()
            run.backward(loss * torch.inf if i == 1 else loss)
            assert run.update(often) is (i != 1)
            if i == 3:
                assert run.update(seldom)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert_close(weights(models[1]), weights(expected), atol=1e-6)


def test_plain_calls_that_fp16_would_falsify_are_errors() -> None:
    x = data()[0].float()
    with quiet(precision="fp16") as run:
        model = run.wrap(net().float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).mean().backward()
        with pytest.raises(UsageError, match="fp16"):
            run.update(optimizer)
        run.backward(model(x).mean())
        with pytest.raises(UsageError, match="scaled for fp16"):
            optimizer.step()


def poisoned(on_nonfinite: str) -> tuple[str, list[float]]:
    """Rank 1's loss is not a number in step 3, and only there."""
    x, y = data()
    model = net()
    try:
        with quiet(on_nonfinite=on_nonfinite) as run:
            model = run.wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in run.steps(range(1, 7)):
                bad = torch.nan if step == 3 and run.rank == run.world_size - 1 else 1.0
                run.backward(((model(x) - y) ** 2).mean() * bad)
                run.update(optimizer)
    except NonFinite as error:
        return str(error), weights(model)
    except RuntimeError:
        return "ended by its peer", weights(model)
    return "trained", weights(model)


def test_a_bad_loss_stops_with_step_and_rank(ranks: Ranks) -> None:
    assert "step 3 on rank 0 is nan" in poisoned("stop")[0]
    messages = [message for message, _ in ranks(poisoned, 2, "stop")]
    assert "step 3 on rank 1 is nan" in messages[1]
    assert "rank 0" not in messages[0], messages


def test_a_bad_step_is_skipped_by_all_ranks(ranks: Ranks) -> None:
    x, y = data()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for world_size in (1, 2):
        for message, found in ranks(poisoned, world_size, "skip"):
            assert message == "trained"
            assert_close(found, weights(model))
