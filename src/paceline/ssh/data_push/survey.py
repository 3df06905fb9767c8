"""What a transfer would do, before anything is sent."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.ssh.connection import Connection
from paceline.ssh.data_push.rsync import CHANGED, problem, require_rsync, run
from paceline.ssh.data_push.sent_data import SentData

_NEWER = " is newer"  # how rsync ends the line about a file that it leaves as it is
# Print those of the paths on stdin that are links.
_FIND_LINKS = (
    """while IFS= read -r path; do if [ -L "$path" ]; then printf '%s\\n' "$path"; fi; done\n"""
)


@dataclass(frozen=True)
class Survey:
    parts: list[tuple[SentData, str]]  # each with its place there
    newer: list[str]  # files that are newer there, which stay as they are
    files: int  # those that are new there or have changed
    size: int  # bytes of these
    is_whole: bool  # whether everything could be looked at

    @property
    def through_links(self) -> list[str]:
        """Folders there that are links, and that are followed."""
        return [place for _, place in self.parts[1:]]

    @property
    def outside(self) -> list[str]:
        """Links that lead out of what is sent."""
        first = self.parts[0][0].path
        found = {
            os.path.relpath(data.path / name, first)
            for data, _ in self.parts
            for name in data.outside
        }
        return sorted(found)


def survey(connection: Connection, data: SentData, *, to: str, rsync: str) -> Survey:
    """Return what there is to send to a place that exists.

    A folder here may be a link there that leads out of the target. rsync 3.5 writes through such a link only if it is
    told to by name, and only if the link belongs to the user or to root, so that folder becomes a part of its own.
    """
    said = "--info=skip1" if require_rsync() >= (3, 1) else "-vv"
    done = run(connection, data, ["--dry-run", said], to=to, rsync=rsync)
    links = (
        _find_links(connection, done.refused, to) if done.refused and done.code in CHANGED else []
    )
    if links and not set(links) & set(data.elsewhere):
        places = [(data.without(links), to), *((data.part(name), f"{to}/{name}") for name in links)]
        return _sum([survey(connection, each, to=place, rsync=rsync) for each, place in places])
    if done.code != 0 and (done.code not in CHANGED or done.refused):
        raise problem(connection, done)
    lines = done.output.decode(errors="replace").splitlines()
    newer = [line.removesuffix(_NEWER) for line in lines if line.endswith(_NEWER)]
    return Survey([(data, to)], newer, done.files, done.size, done.code == 0)


def _find_links(connection: Connection, refused: list[str], to: str) -> list[str]:
    """Return the folders below `to` that are links, the outermost ones, for paths that rsync has refused."""
    folders = set()
    for path in refused:
        name = os.path.relpath(os.path.dirname(path), to)
        while name not in ("", ".") and not name.startswith(".."):
            folders.add(name)
            name = os.path.dirname(name)
    asked = "".join(f"{to}/{name}\n" for name in sorted(folders) if "\n" not in name)
    answer = connection.call(_FIND_LINKS, content=os.fsencode(asked))
    links: list[str] = []
    for line in os.fsdecode(answer.output).splitlines():
        name = line.removeprefix(f"{to}/")
        if name in folders and not any(name.startswith(f"{each}/") for each in links):
            links.append(name)
    return links


def _sum(surveys: list[Survey]) -> Survey:
    return Survey(
        [part for each in surveys for part in each.parts],
        [name for each in surveys for name in each.newer],
        sum(each.files for each in surveys),
        sum(each.size for each in surveys),
        all(each.is_whole for each in surveys),
    )
