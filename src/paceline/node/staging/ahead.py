"""Copying ahead: what the last pack of an item holds is put on the node while the item itself is still looked at.

Looking at a million files takes as long as unpacking them. If nothing has changed since the pack was made, the copy
is the item's; if anything has, it goes, and the item is copied as if nobody had begun.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

from paceline.errors import PacelineError
from paceline.node.staging.copying import Copying, ItemCopy
from paceline.node.staging.folders import check_space, remove_tree
from paceline.node.staging.manifest import Manifest
from paceline.node.staging.packing import Packs
from paceline.node.staging.wish import Wish


class Ahead:
    """The small files of an item on their way to `target`, in a thread. To be ended by `is_of` or by `give_up`."""

    def __init__(
        self, manifest: Manifest, target: Path, *, pack: int, above: Copying, turn: threading.Lock
    ) -> None:
        self.manifest, self.target = manifest, target
        self.copying = Copying(above)
        self._pack, self._turn = pack, turn
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, name="ahead")
        self._thread.start()

    def is_of(self, manifest: Manifest) -> bool:
        """Whether this is the item that was found: if so, wait until it is there; raises what went wrong on the way.
        If not, nothing is left of it."""
        if manifest != self.manifest:
            self.give_up()
            return False
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return True

    def give_up(self) -> None:
        self.copying.stop.set()
        self._thread.join()
        self.copying.count(-self.copying.done)
        if os.path.lexists(self.target):
            remove_tree(self.target)

    def _copy(self) -> None:
        try:
            copy = ItemCopy(self.manifest, self.target, copying=self.copying, fresh=True, pack=self._pack)
            with self._turn, closing(copy):
                copy.frame()
                self.copying.run(copy.small_tasks())
        except BaseException as problem:
            self._problem = problem
        finally:
            os.close(self._pack)


def begin(wish: Wish, data: Path, *, packs: Packs, private: Path, above: Copying) -> dict[str, Ahead]:
    """The items that have a pack, by their names. Those that there may be no room for are left for later."""
    begun: dict[str, Ahead] = {}
    turn = threading.Lock()  # one item has all helpers
    needed = files = 0
    for item in wish.items:
        key = packs.last(os.path.realpath(item.source))
        if not key or not _is_ours(packs.manifest(key)):
            continue
        try:
            manifest, _ = packs.read(key)
            needed, files = needed + manifest.needed, files + len(manifest.files)
            check_space(private, needed, files, host="")
            pack = packs.open(key)
        except (OSError, PacelineError):
            continue
        if pack is not None:
            begun[item.name] = Ahead(manifest, data / item.name, pack=pack, above=above, turn=turn)
    return begun


def _is_ours(path: Path) -> bool:
    """What another user wrote there may name any path."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False
