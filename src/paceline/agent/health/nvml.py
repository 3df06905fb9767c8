"""NVIDIA GPUs through NVML, the driver's own library, by ctypes: no other package is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, TypeVar

from paceline.contract.gpus import VISIBLE_DEVICES, listed_devices

LIBRARY = "libnvidia-ml.so.1"
_GPU_SENSOR = 0
_UNCORRECTED, _SINCE_BOOT = 1, 0
_XID_EVENTS = 8
_MAX_EVENTS = 64  # read at a time
# Reasons of the driver to slow a GPU down that are not the program's doing, in the bits that it
# reports.
_SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power supply"}
_NAME_LENGTH = 96
_Result = TypeVar("_Result", bound="ctypes._CData")


class Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Gpus:
    """The GPUs that the ranks of this node see."""

    def __init__(self, library: ctypes.CDLL, handles: list[ctypes.c_void_p]) -> None:
        self._library = library
        self._handles = handles
        self.models = [
            {"name": self._name(handle), "memory": self._memory(handle).total} for handle in handles
        ]
        self._xids: dict[int | None, int] = {}  # the last error of each GPU
        self._events = self._listen()

    @classmethod
    def open(cls, environ: Mapping[str, str], *, library: str = LIBRARY) -> Gpus | None:
        """Return the visible GPUs, or None if there are none, or no driver."""
        try:
            loaded = ctypes.CDLL(library)
            if loaded.nvmlInit_v2() != 0:
                return None
        except (OSError, AttributeError):
            return None
        handles = _visible_handles(loaded, environ.get(VISIBLE_DEVICES))
        if not handles:
            loaded.nvmlShutdown()
            return None
        return cls(loaded, handles)

    def sample(self) -> list[dict[str, Any]]:
        """Return one entry per GPU: busy (%), memory (bytes), power (W), temperature (C), as far as
        it reports them.

        If something is wrong with it: also `ecc` (uncorrected errors), `slowdown` (why) and `xid`
        (its last error).
        """
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            event = self._read("nvmlEventSetWait_v2", Event(), self._events, after=(0,))
            if event is None:
                break
            self._xids[event.device] = event.data
        return [self._sample(handle) for handle in self._handles]

    def close(self) -> None:
        if self._events is not None:
            self._library.nvmlEventSetFree(self._events)
        self._library.nvmlShutdown()

    def _listen(self) -> ctypes.c_void_p | None:
        """Ask the driver to report errors (Xid). Older drivers and MIG slices do not."""
        events = self._read("nvmlEventSetCreate", ctypes.c_void_p())
        if events is not None:
            for handle in self._handles:
                self._library.nvmlDeviceRegisterEvents(
                    handle, ctypes.c_ulonglong(_XID_EVENTS), events
                )
        return events

    def _read(
        self, name: str, into: _Result, *args: Any, after: tuple[int, ...] = ()
    ) -> _Result | None:
        """Have a function of the driver write into a value; None if it fails, or some drivers lack
        it.
        """
        function = getattr(self._library, name, None)
        if function is None or function(*args, ctypes.byref(into), *after) != 0:
            return None
        return into

    def _sample(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rates = self._read("nvmlDeviceGetUtilizationRates", Utilization(), handle)
        if rates is not None:
            found["busy"] = rates.gpu
        memory = self._memory(handle)
        if memory.total:
            found["memory"] = memory.used
        power = self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint(), handle)
        if power is not None:
            found["power"] = round(power.value / 1000, 1)
        heat = self._read("nvmlDeviceGetTemperature", ctypes.c_uint(), handle, _GPU_SENSOR)
        if heat is not None:
            found["temperature"] = heat.value
        ecc = self._read(
            "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong(), handle, _UNCORRECTED, _SINCE_BOOT
        )
        if ecc is not None and ecc.value:
            found["ecc"] = ecc.value
        slow = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong(), handle)
        bits = slow.value if slow is not None else 0
        reasons = dict.fromkeys(reason for bit, reason in _SLOWDOWNS.items() if bits & bit)
        if reasons:
            found["slowdown"] = ", ".join(reasons)
        if handle.value in self._xids:
            found["xid"] = self._xids[handle.value]
        return found

    def _memory(self, handle: ctypes.c_void_p) -> Memory:
        """Return the memory of a GPU; all zero if it does not report it."""
        return self._read("nvmlDeviceGetMemoryInfo", Memory(), handle) or Memory()

    def _name(self, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_NAME_LENGTH)
        self._library.nvmlDeviceGetName(handle, text, ctypes.c_uint(_NAME_LENGTH))
        return text.value.decode(errors="replace")


def _visible_handles(library: ctypes.CDLL, devices: str | None) -> list[ctypes.c_void_p]:
    """Return handles of the GPUs that CUDA_VISIBLE_DEVICES lists, by number or UUID; of all GPUs
    if it is not set.
    """
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    names = [str(number) for number in range(count.value)]
    if devices is not None:
        names = listed_devices(devices)
    found = []
    for name in names:
        handle = ctypes.c_void_p()
        if name.isdigit():
            code = library.nvmlDeviceGetHandleByIndex_v2(
                ctypes.c_uint(int(name)), ctypes.byref(handle)
            )
        else:
            code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if code == 0:
            found.append(handle)
    return found
