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


class Training:
    """A rank with some optimizers that share a backward pass. It notes in which steps it gets the signal, and after
    which ones it would take it."""

    def __init__(self, optimizers: int = 1, *, has_group: bool = True) -> None:
        if has_group:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if has_group else 0
        self.heartbeats = Heartbeats(1)
        self.heartbeats.reset(1)
        assert CommonStep(str(self.heartbeats.path), 0).install()
        self.weights = [torch.zeros(1, requires_grad=True) for _ in range(optimizers)]
        self.optimizers = [torch.optim.SGD([weight], 0.1) for weight in self.weights]
        self.now = 0
        self.signalled: list[int] = []
        self.takes: list[bool] = []
        signal.signal(signal.SIGTERM, lambda *_: self.signalled.append(self.now))

    def request(self) -> None:
        self.heartbeats.signal_at_common_step(signal.SIGTERM)

    def step(self, *, in_lockstep: bool = True, delay: float = 0.0) -> None:
        for weight in self.weights:
            weight.grad = torch.ones(1)
            if in_lockstep:
                dist.all_reduce(weight.grad)
        for optimizer in self.optimizers:
            time.sleep(delay)
            optimizer.step()
        self.takes.append(self.heartbeats.read(0).at_steps == TAKES_SIGNALS)
        self.now += 1


def train(requests: list[int], optimizers: int) -> tuple[list[int], list[bool]]:
    """Each rank learns of the request in a step of its own, as on nodes of their own; -1 is never. With several
    optimizers, rank 1 makes all of its steps while rank 0 is between its own."""
    training = Training(optimizers)
    for step in range(STEPS):
        if step == requests[training.rank]:
            training.request()
        training.step(delay=0.02 if optimizers > 1 and training.rank == 0 else 0.0)
    dist.barrier()
    training.heartbeats.remove()
    return training.signalled, training.takes


def test_all_ranks_get_the_signal_after_the_same_step(ranks: Ranks) -> None:
    for requests in ([5, 20, 11], [20, 5, 12]):
        (first, takes), (second, _), (third, _) = ranks(train, 3, requests, 1)
        assert first == second == third
        assert len(first) == 1
        assert 20 < first[0] <= 22
        assert takes == [True] * first[0] + [False] * (STEPS - first[0])


def test_no_rank_is_signalled_before_all_know_of_the_request(ranks: Ranks) -> None:
    assert [signalled for signalled, _ in ranks(train, 2, [5, -1], 1)] == [[], []]


def test_two_optimizers_with_one_backward_pass(ranks: Ranks) -> None:
    for requests in ([5, 20], [20, 5]):
        (first, _), (second, _) = ranks(train, 2, requests, 2)
        assert first == second
        assert len(first) == 1


def step_alone() -> tuple[list[int], list[bool]]:
    training = Training(has_group=False)
    training.step(in_lockstep=False)
    training.request()
    training.step(in_lockstep=False)
    training.step(in_lockstep=False)
    training.heartbeats.remove()
    return training.signalled, training.takes


def test_a_rank_without_a_group_takes_signals_at_any_time(ranks: Ranks) -> None:
    assert ranks(step_alone, 1) == [([1], [False] * 3)]


def train_with_a_timer(interval: float) -> tuple[int | None, bool]:
    """The handler only starts a timer, as that of Hugging Face's Trainer does. Return in which step it ran out."""
    training = Training()
    steps, timers = [], []

    def start_timer(*_: object) -> None:
        wait = (training.rank + 1) * interval
        timers.append(threading.Timer(wait, lambda: steps.append(training.now)))
        timers[0].start()

    signal.signal(signal.SIGTERM, start_timer)
    training.request()
    for step in range(STEPS):
        training.step(in_lockstep=step < 5)  # the signal comes in one of these
    is_waiting = timers[0].is_alive()
    timers[0].cancel()
    dist.barrier()
    training.heartbeats.remove()
    return (steps[0] if steps else None), is_waiting


def test_timers_of_handlers_run_out_in_the_same_step(ranks: Ranks) -> None:
    (first, _), (second, _) = ranks(train_with_a_timer, 2, 0.3)
    assert first == second is not None
    assert first < 5


def test_long_timers_are_not_waited_for(ranks: Ranks) -> None:
    assert ranks(train_with_a_timer, 2, 1000.0) == [(None, True)] * 2
