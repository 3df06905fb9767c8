"""Which GPUs the environment shows to a process.

Keep this module light: `paceline run` reads it before it has imported anything.
"""

from __future__ import annotations

import itertools

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
TYPE_CHECKING = False  # typing's own takes long to import
if TYPE_CHECKING:
    from collections.abc import Mapping

# NVIDIA's, then AMD's two, of which HIP's narrows ROCr's. The first that is set counts.
NAMES = (VISIBLE_DEVICES, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NONE = ("", "-1", "NoDevFiles")  # ends a list


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that the environment lists, by number or by identity; None if it does not
    restrict them.
    """
    for name in NAMES:
        if name in environ:
            return listed_devices(environ[name])
    return None


def listed_devices(text: str) -> list[str]:
    """Return the devices in a list such as "0,2". As for the driver, an invalid entry ends the
    list.
    """
    devices = [entry.strip() for entry in text.split(",")]
    return list(itertools.takewhile(lambda device: device not in _NONE, devices))
