"""The context of a GPU, created in a thread: that takes about as long as it takes the ranks to find each other.

The thread has ended before the session opens, so nothing forks meanwhile: a child would inherit its locks.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress

import torch

DRIVER = "libcuda.so.1"


class DeviceContext:
    """Begins to create the context of this rank's device, if it is an NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0  # that it took, whoever waited for it
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._create, name="paceline-context", daemon=True)
            self._thread.start()

    def _create(self) -> None:
        """Ask the driver: torch would hold Python's lock while it does the same. If it fails, torch will say why."""
        began = time.perf_counter()
        with suppress(OSError, AttributeError):  # another driver, such as AMD's
            driver = ctypes.CDLL(DRIVER)
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            driver.cuInit(0)
            if driver.cuDeviceGet(ctypes.byref(handle), self._device.index) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        self.seconds = time.perf_counter() - began

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def activate(self) -> None:
        """Make the device the current one of this process, with its context."""
        self.join()
        if self._device.type in ("cuda", "xpu"):
            getattr(torch, self._device.type).set_device(self._device)
