"""The memory of saves: one image, made beside the training, kept until the state's layout changes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paceline.runtime.checkpoint import shares
from paceline.runtime.checkpoint.image import Image
from paceline.runtime.checkpoint.state_tree import Taken


class Memory:
    """Gives the image that fits a state. `prepare` makes it ahead of time, so that the first save costs no more."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._image: Image | None = None
        self._layout: Any = None
        self._preparing: threading.Thread | None = None

    @property
    def is_preparing(self) -> bool:
        return self._preparing is not None and self._preparing.is_alive()

    def prepare(self, taken: Taken) -> None:
        """Map, touch and page-lock in a thread what the next save of this state will need."""
        self._join()
        layout = _layout(taken)
        if self._image is not None and self._layout == layout:
            return
        self.release()
        device = next((each.device for each in taken.tensors.values() if each.is_cuda), None)

        def make() -> None:
            image = self._make(taken)
            image.touch()
            if device is not None:
                torch.cuda.set_device(device)  # else this thread would open a context on the first GPU
                image.pin()
            self._image, self._layout = image, layout

        self._preparing = threading.Thread(target=make, name="paceline-checkpoint-memory", daemon=True)
        self._preparing.start()

    def image_for(self, taken: Taken) -> Image:
        self._join()
        layout = _layout(taken)
        if self._image is None or self._layout != layout:
            self.release()
            taken.check()
            self._image, self._layout = self._make(taken), layout
        return self._image

    def release(self) -> None:
        self._join()
        if self._image is not None:
            self._image.close()
            self._image = None

    def _make(self, taken: Taken) -> Image:
        return Image(shares.cut(taken.tensors, taken.sharded, rank=self.rank, world_size=self.world_size))

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None


def _layout(taken: Taken) -> Any:
    """What an image depends on: every name, shape and dtype, and the shapes of this rank's shards."""
    local = [(name, each.to_local().shape) for name, each in taken.sharded.items()]
    return shares.signature(taken.tensors), shares.signature(taken.sharded), local
