"""Transfer ahead: what the last pack of an item holds is put on the node while the item itself is still looked at.

Looking at a million files takes as long as unpacking them. If nothing has changed since the pack was made, the copy
is the item's; if anything has, it goes, and the item is copied as if nobody had begun.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

from paceline.agent.staging.copy.transfer import ItemCopy, Stopped, Transfer
from paceline.agent.staging.folders import check_free_space, remove_tree
from paceline.agent.staging.manifest import Manifest
from paceline.agent.staging.packs import Packs
from paceline.agent.staging.request import Item
from paceline.errors import EnvironmentProblem


class ItemPrefetch:
    """The small files of an item on their way to `target`, in a thread. To be ended by `is_of` or by `give_up`."""

    def __init__(
        self, manifest: Manifest, target: Path, *, pack: int, above: Transfer, turn: threading.Lock
    ) -> None:
        self.manifest, self.target = manifest, target
        self.copying = Transfer(above)
        self._pack, self._turn = pack, turn
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, name="ahead")
        self._thread.start()

    def is_of(self, manifest: Manifest) -> bool:
        """Whether this is the item that was found: if so, wait until it is there; raises what went wrong on the way.
        If not, nothing is left of it."""
        if manifest != self.manifest:
            if not self.give_up():
                raise EnvironmentProblem(
                    f"[data] stage: {self.target} is there from an older pack, and cannot be removed",
                    hint="is that disk sound? set folder in [data] to another",
                )
            return False
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return True

    def give_up(self) -> bool:
        """Whether nothing is left of it."""
        self.copying.stop.set()
        self._thread.join()
        self.copying.count(-self.copying.done)
        return not os.path.lexists(self.target) or remove_tree(self.target)

    def _copy(self) -> None:
        try:
            copy = ItemCopy(self.manifest, self.target, copying=self.copying, fresh=True, pack=self._pack)
            with self._turn, closing(copy):
                if self.copying.is_over:
                    raise Stopped
                copy.frame()
                self.copying.run(copy.small_tasks())
        except BaseException as problem:
            self._problem = problem
        finally:
            os.close(self._pack)


class Prefetcher:
    """Items that are copied ahead, by their names. One of them has all helpers at a time."""

    def __init__(self, packs: Packs, *, private: Path, data: Path, above: Transfer) -> None:
        self.packs, self.private, self.data, self.above = packs, private, data, above
        self.begun: dict[str, ItemPrefetch] = {}
        self._turn = threading.Lock()
        self._needed = self._files = 0

    def begin(self, item: Item) -> None:
        """If it has a pack of ours, and there is room. Whatever else is the matter is found out in its turn."""
        try:
            manifest = self.packs.read_last(os.path.realpath(item.source))
            if manifest is None:
                return
            self._needed += manifest.needed
            self._files += len(manifest.files)
            check_free_space(self.private, self._needed, self._files, host="")
            pack = self.packs.open(manifest.key)
        except Exception:
            return
        if pack is not None:
            self.begun[item.name] = ItemPrefetch(
                manifest, self.data / item.name, pack=pack, above=self.above, turn=self._turn
            )

    @property
    def done(self) -> int:
        return sum(each.copying.done for each in self.begun.values())

    def settle(self, name: str, manifest: Manifest) -> Manifest | None:
        """The manifest of the pack, whose key is known, where the item was copied ahead and is still the same."""
        begun = self.begun.pop(name, None)
        if begun is None:
            return None
        if begun.is_of(manifest):
            return begun.manifest
        self.packs.forget(manifest.source)
        return None

    def give_up(self) -> None:
        for each in self.begun.values():
            each.copying.stop.set()
        while self.begun:
            self.begun.popitem()[1].give_up()
