"""Prefetch: unpack the last pack of an item while the item itself is still being scanned.

Scanning a million files takes as long as unpacking them. If nothing has changed since the pack was
made, the copy is the item's; otherwise it is removed and the item is copied from scratch.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

from paceline.errors import EnvironmentProblem
from paceline.staging.copy.transfer import ItemCopy, Stopped, Transfer
from paceline.staging.folders import check_free_space, remove_tree
from paceline.staging.manifest import Manifest
from paceline.staging.pack_store import Packs
from paceline.staging.request import Item


class ItemPrefetch:
    """A thread that unpacks the small files of an item to `target`. End it with `accept` or
    `cancel`.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: Path,
        *,
        pack: int,
        transfer: Transfer,
        turn: threading.Lock,
    ) -> None:
        self.manifest, self.target = manifest, target
        self.transfer = Transfer(transfer)
        self._pack, self._turn = pack, turn
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, name="prefetch")
        self._thread.start()

    def accept(self, manifest: Manifest) -> bool:
        """If the scan found the same files, wait for the copy (raising its error); otherwise
        remove it.
        """
        if manifest != self.manifest:
            if not self.cancel():
                raise EnvironmentProblem(
                    f"[data] stage: Cannot remove {self.target}, which was copied from an "
                    "outdated pack.",
                    hint="Check that disk, or set folder in [data] to another one.",
                )
            return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> bool:
        """Stop and remove the copy. Returns whether it is all gone."""
        self.transfer.stop.set()
        self._thread.join()
        self.transfer.add(-self.transfer.done)
        return not os.path.lexists(self.target) or remove_tree(self.target)

    def _copy(self) -> None:
        try:
            copy = ItemCopy(
                self.manifest, self.target, transfer=self.transfer, fresh=True, pack=self._pack
            )
            with self._turn, closing(copy):
                if self.transfer.is_stopped:
                    raise Stopped
                copy.make_folders_and_links()
                self.transfer.run(copy.small_tasks())
        except BaseException as error:
            self._error = error
        finally:
            os.close(self._pack)


class Prefetcher:
    """The prefetches of a node, by item name. They take turns: one at a time has all helpers."""

    def __init__(self, packs: Packs, *, private: Path, data: Path, transfer: Transfer) -> None:
        self.packs, self.private, self.data, self.transfer = packs, private, data, transfer
        self.started: dict[str, ItemPrefetch] = {}
        self._turn = threading.Lock()
        self._bytes = self._files = 0

    def start(self, item: Item) -> None:
        """Prefetch an item if it has a pack of ours and there is space. Other problems show up in
        the regular copy.
        """
        try:
            manifest = self.packs.read_last(os.path.realpath(item.source))
            if manifest is None:
                return
            self._bytes += manifest.disk_usage
            self._files += len(manifest.files)
            check_free_space(self.private, self._bytes, self._files, host="")
            pack = self.packs.open(manifest.key)
        except Exception:
            return
        if pack is not None:
            self.started[item.name] = ItemPrefetch(
                manifest, self.data / item.name, pack=pack, transfer=self.transfer, turn=self._turn
            )

    @property
    def done(self) -> int:
        return sum(prefetch.transfer.done for prefetch in self.started.values())

    def accept(self, name: str, manifest: Manifest) -> Manifest | None:
        """Return the pack's manifest, whose key is known, if the item was prefetched and has not
        changed.
        """
        prefetch = self.started.pop(name, None)
        if prefetch is None:
            return None
        if prefetch.accept(manifest):
            return prefetch.manifest
        self.packs.clear_last(manifest.source)
        return None

    def cancel(self) -> None:
        for prefetch in self.started.values():
            prefetch.transfer.stop.set()
        while self.started:
            self.started.popitem()[1].cancel()
