"""W&B's offline files, kept complete: its service writes late, and loses buffered lines when it is
killed.

`metrics.jsonl` has every line. At each clean end we record how much of it complete W&B files cover.
The next start logs the lines after that again, and renames the incomplete folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.runtime.trackers.thread import parse_line

COVERED = "covered"  # file: how many bytes of metrics.jsonl complete W&B files cover
COMPLETE = "complete"  # file: marks the folder of a W&B run that was written to its end
TORN = "torn-"  # prefix of an incomplete folder's new name


class OfflineFiles:
    """The folders `offline-run-<time>-<id>` of one W&B run in `<run>/trackers/wandb`."""

    def __init__(self, run: Path, id: str) -> None:
        self._metrics = RunFolder(run).metrics
        self._folder = RunFolder(run).trackers / "wandb"
        self._id = id

    def is_torn(self) -> bool:
        """Return whether an incomplete folder exists that has not been sent."""
        folders = self._folder.glob(f"offline-run-*-{self._id}")
        return any(
            not (each / COMPLETE).exists() and not any(each.glob("*.synced")) for each in folders
        )

    def set_aside(self) -> bool:
        """Rename incomplete folders. Return False if one was already sent: its lines must not be
        sent twice.
        """
        for folder in sorted(self._folder.glob(f"offline-run-*-{self._id}")):
            if (folder / COMPLETE).exists():
                continue
            if any(folder.glob("*.synced")):
                return False
            folder.rename(folder.with_name(f"{TORN}{folder.name}"))
        return True

    def read_covered(self) -> int:
        try:
            return int((self._folder / COVERED).read_text())
        except (OSError, ValueError):
            return 0

    def close(self, folder: Path | None) -> None:
        """Record a clean end, once all lines have been taken."""
        if folder is not None:
            (folder / COMPLETE).touch()
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        write_atomically(self._folder / COVERED, f"{size}\n")

    def missing_lines(
        self, *, until: int, more: int = 0
    ) -> Iterator[tuple[int, dict[str, float | str]]]:
        """Yield the lines that no complete file covers, up to `until` bytes and then `more`
        lines.
        """
        try:
            with open(self._metrics, "rb") as file:
                position = file.seek(min(self.read_covered(), until))
                for line in file:
                    if position >= until:
                        if not more:
                            return
                        more -= 1
                    position += len(line)
                    try:
                        yield parse_line(line.decode())
                    except (ValueError, AttributeError):
                        continue  # half a line of an attempt that was killed
        except OSError:
            return
