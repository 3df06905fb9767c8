"""Ranks that learn of a stop request in different steps get its signal after the same one."""

from __future__ import annotations

import signal
import threading
import time

import torch
import torch.distributed as dist

from paceline.agent.framework_watch import CommonStep
from paceline.agent.health.heartbeat import Heartbeats
from paceline.contract.heartbeat_file import TAKES_SIGNALS
from tests.forked_ranks import Ranks

STEPS = 40


def train(requests: list[int], in_lockstep: bool) -> tuple[list[int], list[bool]]:
    """Each rank learns of the request in a step of its own, as on nodes of their own; -1 is never."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    heartbeats = Heartbeats(1)
    heartbeats.reset(1)
    assert CommonStep(str(heartbeats.path), 0).install()
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    signalled, takes = [], []
    signal.signal(signal.SIGTERM, lambda *_: signalled.append(step))
    for step in range(STEPS):
        if step == requests[rank]:
            heartbeats.signal_at_common_step(signal.SIGTERM)
        weight.grad = torch.ones(1)
        if in_lockstep:
            dist.all_reduce(weight.grad)
        optimizer.step()
        takes.append(heartbeats.read(0).at_steps == TAKES_SIGNALS)
    dist.barrier()
    heartbeats.remove()
    return signalled, takes


def test_all_ranks_get_the_signal_after_the_same_step(ranks: Ranks) -> None:
    for requests in ([5, 20, 11], [20, 5, 12]):
        (first, takes), (second, _), (third, _) = ranks(train, 3, requests, True)
        assert first == second == third
        assert len(first) == 1
        assert 20 < first[0] <= 22
        assert takes == [True] * first[0] + [False] * (STEPS - first[0])


def test_no_rank_is_signalled_before_all_know_of_the_request(ranks: Ranks) -> None:
    assert [signalled for signalled, _ in ranks(train, 2, [5, -1], True)] == [[], []]


def train_two_optimizers(requests: list[int]) -> list[int]:
    """They share a backward pass, so rank 1 makes both of its steps while rank 0 is between its own."""
    dist.init_process_group("gloo")
    heartbeats = Heartbeats(1)
    heartbeats.reset(1)
    CommonStep(str(heartbeats.path), 0).install()
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], 0.1) for weight in weights]
    signalled: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: signalled.append(step))
    for step in range(STEPS):
        if step == requests[dist.get_rank()]:
            heartbeats.signal_at_common_step(signal.SIGTERM)
        for weight in weights:
            weight.grad = torch.ones(1)
            dist.all_reduce(weight.grad)
        for optimizer in optimizers:
            time.sleep(0.02 * (dist.get_rank() == 0))
            optimizer.step()
    dist.barrier()
    heartbeats.remove()
    return signalled


def test_two_optimizers_with_one_backward_pass(ranks: Ranks) -> None:
    for requests in ([5, 20], [20, 5]):
        first, second = ranks(train_two_optimizers, 2, requests)
        assert first == second
        assert len(first) == 1


def step_alone() -> tuple[list[int], bool]:
    heartbeats = Heartbeats(1)
    heartbeats.reset(1)
    CommonStep(str(heartbeats.path), 0).install()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    signalled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signalled.append(number))
    optimizer.step()
    takes = heartbeats.read(0).at_steps == TAKES_SIGNALS
    heartbeats.signal_at_common_step(signal.SIGTERM)
    optimizer.step()
    optimizer.step()
    heartbeats.remove()
    return signalled, takes


def test_a_rank_without_a_group_takes_signals_at_any_time(ranks: Ranks) -> None:
    assert ranks(step_alone, 1) == [([15], False)]


def train_with_a_timer(interval: float) -> tuple[int | None, bool]:
    """The handler only starts a timer, as that of Hugging Face's Trainer does. Return in which step it ran out."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    heartbeats = Heartbeats(1)
    heartbeats.reset(1)
    CommonStep(str(heartbeats.path), 0).install()
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    steps, timers = [], []

    def start_timer(*_: object) -> None:
        timers.append(threading.Timer((rank + 1) * interval, lambda: steps.append(step)))
        timers[0].start()

    signal.signal(signal.SIGTERM, start_timer)
    heartbeats.signal_at_common_step(signal.SIGTERM)
    for step in range(STEPS):
        weight.grad = torch.ones(1)
        if step < 5:  # the signal comes in one of these
            dist.all_reduce(weight.grad)
        optimizer.step()
    is_waiting = timers[0].is_alive()
    timers[0].cancel()
    dist.barrier()
    heartbeats.remove()
    return (steps[0] if steps else None), is_waiting


def test_timers_of_handlers_run_out_in_the_same_step(ranks: Ranks) -> None:
    (first, _), (second, _) = ranks(train_with_a_timer, 2, 0.3)
    assert first == second is not None
    assert first < 5


def test_long_timers_are_not_waited_for(ranks: Ranks) -> None:
    assert ranks(train_with_a_timer, 2, 1000.0) == [(None, True)] * 2
