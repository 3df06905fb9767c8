"""Create a GPU's context in a thread, so that the rank does not wait for it.

Meanwhile, several ranks find each other, and a single rank continues with its script, which builds
the model and the data. No process forks in that time: a child would inherit locks that nobody
releases.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from contextlib import suppress

import torch

DRIVER = "libcuda.so.1"

_threads: list[threading.Thread] = []  # at most the last one; it may have ended


class DeviceContext:
    """Begins to create the context of this rank's device, if it is an NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0  # that it took, whoever waited for it
        if device.type == "cuda":
            thread = threading.Thread(target=self._create, name="paceline-context", daemon=True)
            if not _threads and hasattr(os, "register_at_fork"):
                os.register_at_fork(before=join)
                atexit.register(join)  # the driver must not end in the middle of it
            _threads[:] = [thread]
            thread.start()

    @property
    def is_default(self) -> bool:
        """Whether torch uses this device without being told: then nobody need wait for its
        context.
        """
        return self._device.type == "cuda" and self._device.index == 0

    def _create(self) -> None:
        """Ask the driver: torch would hold Python's lock while it does the same. If it fails,
        torch will say why.
        """
        began = time.perf_counter()
        with suppress(OSError, AttributeError):  # another driver, such as AMD's
            driver = ctypes.CDLL(DRIVER)
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            driver.cuInit(0)
            if driver.cuDeviceGet(ctypes.byref(handle), self._device.index) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        self.seconds = time.perf_counter() - began

    def activate(self) -> None:
        """Make the device the current one of this process, with its context."""
        join()
        if self._device.type in ("cuda", "xpu"):
            getattr(torch, self._device.type).set_device(self._device)


def join() -> None:
    """Wait until the thread has ended, if there is one."""
    for thread in _threads:
        if thread is not threading.current_thread():
            thread.join()
