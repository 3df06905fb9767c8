"""What W&B keeps of a run on disk, made whole: its service writes late, and a killed one loses what it held back.

`metrics.jsonl` has every line, so nothing needs to be lost: up to where whole files of W&B reach is written down at
each clean end. Lines after that are logged again by whoever comes next, and the torn file of before is set aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.runtime.trackers.feed import record

REACHES = "reaches"  # how many bytes of metrics.jsonl whole files of W&B hold
WHOLE = "whole"  # in the folder of a W&B run that was written to its end
TORN = "torn-"  # what the name of a folder that is set aside begins with


class KeptFiles:
    """The folders `offline-run-<time>-<id>` of one W&B run, below `<run>/trackers/wandb`."""

    def __init__(self, run: Path, id: str) -> None:
        self._metrics = RunFolder(run).metrics
        self._place = RunFolder(run).trackers / "wandb"
        self._id = id

    def is_torn(self) -> bool:
        """Whether there is a folder that was not written to its end, and has not been sent as it is."""
        folders = self._place.glob(f"offline-run-*-{self._id}")
        return any(not (each / WHOLE).exists() and not any(each.glob("*.synced")) for each in folders)

    def set_aside(self) -> bool:
        """Torn folders get another name. False when one of them was sent already: what it holds must not come twice."""
        for folder in sorted(self._place.glob(f"offline-run-*-{self._id}")):
            if (folder / WHOLE).exists():
                continue
            if any(folder.glob("*.synced")):
                return False
            folder.rename(folder.with_name(f"{TORN}{folder.name}"))
        return True

    def reach(self) -> int:
        try:
            return int((self._place / REACHES).read_text())
        except (OSError, ValueError):
            return 0

    def close(self, folder: Path | None) -> None:
        """After a clean end, when all lines have been taken."""
        if folder is not None:
            (folder / WHOLE).touch()
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        write_atomically(self._place / REACHES, f"{size}\n")

    def lines(self, *, until: int, more: int = 0) -> Iterator[tuple[int, dict[str, float | str]]]:
        """The lines that no whole file holds: those before `until` bytes, and so many after it."""
        try:
            with open(self._metrics, "rb") as file:
                position = file.seek(min(self.reach(), until))
                for line in file:
                    if position >= until:
                        if not more:
                            return
                        more -= 1
                    position += len(line)
                    try:
                        yield record(line.decode())
                    except (ValueError, AttributeError):
                        continue  # half a line, of an attempt that was killed
        except OSError:
            return
