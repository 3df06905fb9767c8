"""Staging on this machine: scan and pack data before any job needs it, and find what runs have
left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.plan.launch_spec import data_settings
from paceline.spec import Job
from paceline.staging import leftovers
from paceline.staging.copy.progress import show_progress
from paceline.staging.copy.transfer import Transfer
from paceline.staging.folders import choose_base, format_size
from paceline.staging.pack_store import Packs, make_packs
from paceline.staging.request import StagingRequest, make_request
from paceline.staging.stager import ScannedItem, scan_items, scan_notes

Leftover = leftovers.Leftover


def staging_request(job: Job, *, scratch: Path, environ: Mapping[str, str]) -> StagingRequest:
    """Return the request as the agents of a job would read it."""
    return make_request(data_settings(job), base=scratch / job.project_name, environ=environ)


@dataclass(frozen=True)
class DataScan:
    """What a request would stage."""

    items: list[ScannedItem]
    packs: Packs

    def summary(self) -> list[str]:
        """Describe each item in a line."""
        lines = []
        for item in self.items:
            files, small = len(item.manifest.files), len(item.manifest.small())
            lines.append(
                f"{item.name}: {files} files ({small} small), {format_size(item.manifest.size)}"
            )
        return lines

    def notes(self) -> list[str]:
        return scan_notes(self.items)

    def pack(self, say: Callable[[str], None]) -> int:
        """Pack the small files, with a progress bar. Returns the number of new packs."""
        transfer = Transfer()
        with show_progress("packing", transfer, say=say):
            return make_packs([item.manifest for item in self.items], self.packs, transfer)


def scan_data(request: StagingRequest) -> DataScan:
    packs = Packs(request.packs)
    return DataScan(scan_items(request, packs), packs)


def data_folders(request: StagingRequest, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders where runs that you start here put their data on this machine."""
    folders = [Path(environ.get("TMPDIR") or "/tmp"), Path("/tmp")]
    with suppress(UsageError):  # the folder's path has variables that only a job knows
        folders.insert(0, choose_base(request, environ))
    return list(dict.fromkeys(folders))


def find_leftovers(folder: Path, environ: Mapping[str, str], *, all_cached: bool) -> list[Leftover]:
    """Return what your runs have left in a data folder of this machine."""
    return leftovers.find_leftovers(folder, environ, all_cached=all_cached)
