"""The context of a GPU, created in a thread; here with a driver that only records its calls."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest
import torch

from paceline.runtime.distributed import device_context
from paceline.runtime.distributed.device_context import DeviceContext

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Driver:
    """Creates a context once `may_go` is set."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.may_go = calls, threading.Event()

    def cuInit(self, flags: int) -> int:
        self.calls.append("init")
        return 0

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        self.calls.append(number)
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        self.may_go.wait(60)
        self.calls.append("context")
        return 0


def test_the_rank_goes_on_until_it_needs_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    driver = Driver(calls)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    context = DeviceContext(torch.device("cuda", 3))
    calls.append("rendezvous")
    driver.may_go.set()
    context.activate()
    assert set(calls[:3]) == {"init", 3, "rendezvous"}
    assert calls[3:] == ["context", torch.device("cuda", 3)]
    assert context.seconds > 0


def test_nothing_forks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a data loader would inherit the locks of the thread."""
    calls: list[Any] = []
    driver = Driver(calls)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    context = DeviceContext(torch.device("cuda", 0))
    assert context.is_default
    threading.Timer(0.2, driver.may_go.set).start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if calls == ["init", 0, "context"] else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_without_that_driver_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(device_context, "DRIVER", "there-is-no-such-library.so")
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    DeviceContext(torch.device("cuda", 0)).activate()
    assert calls == [torch.device("cuda", 0)]


def test_a_cpu_needs_none() -> None:
    before = threading.active_count()
    context = DeviceContext(torch.device("cpu"))
    assert threading.active_count() == before
    context.activate()
    assert context.seconds == 0.0


@pytest.mark.gpu
@needs_gpu
def test_a_real_context() -> None:
    context = DeviceContext(torch.device("cuda", torch.cuda.device_count() - 1))
    context.activate()
    assert torch.cuda.current_device() == torch.cuda.device_count() - 1
    assert torch.ones(2, device="cuda").sum().item() == 2.0
    assert context.seconds > 0
