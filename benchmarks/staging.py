"""Staging beside `cp -r`, `rsync -a` and `tar | tar`, in one run: many small files, and a few large ones.

    python benchmarks/staging.py [--files 20000] [--megabytes 2000] [--rounds 5] [--folder DIR] [--disk DIR]

The source lies in DIR: once it is read where it is, and once through a network file system, as nodes of a cluster read
theirs (sshfs from a server on this machine, where that is installed). The copies go to --disk, the node's own.

"first job" packs the small files on its way; "later jobs" read the pack, on whatever node; "same node, kept" finds the
data where an earlier job left it (`keep`).

Nodes that start a job have not read the source before: it is not in the page cache, nor is anything known of it on the
network, when a copy begins. Each goes into a folder of its own, with nothing left to be written from before. Small
copies stay until the end, since ext4 is slow to make files for some minutes after many were removed, which would be
measured instead. All ways take turns, in another order in every round: memory that somebody has just given back is
quicker to be had. The least time of each is compared: what else the machine does only ever adds to it. CPU seconds are
those of the copying processes, user and system, without the server's.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.agent.staging.folders import private_folder
from paceline.agent.staging.request import make_request
from paceline.agent.staging.stage import Stager, look

from machine import describe, show
from network_folder import NetworkFolder, lacking

FIRST, LATER, KEPT = "paceline, first job", "paceline, later jobs", "paceline, same node, kept"
TARGETS = {"small": {FIRST: 1.0, LATER: 2.0, KEPT: 2.0}, "large": {FIRST: 1.0, LATER: 1.0}}


def plant_small(root: Path, count: int) -> None:
    """As image sets are: a hundred folders of files of a few kilobytes."""
    chance = random.Random(1)
    for number in range(count):
        folder = root / f"class-{number % 100:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(chance.randbytes(chance.randrange(1000, 8000)))


def plant_large(root: Path, megabytes: int) -> None:
    root.mkdir(parents=True)
    block = os.urandom(1_000_000)
    for number in range(4):
        with open(root / f"shard-{number}.tar", "wb") as file:
            for _ in range(megabytes // 4):
                file.write(block)


def ours(base: Path, name: str, disk: Path, *, keep: int = 0) -> None:
    wish = make_request({"stage": [name], "keep": keep}, base=base, environ=os.environ)
    private = private_folder(disk)
    data = Path(tempfile.mkdtemp(dir=private))
    stager = Stager(wish, private=private, data=data, host="here", makes_packs=True)
    stager.begin()
    stager.stage(look(wish, stager.packs))
    for lock in stager.locks:
        lock.close()


def shell(command: str, base: Path, name: str, disk: Path) -> None:
    subprocess.run(
        ["bash", "-c", command.format(source=f"{base}/{name}", base=base, name=name, disk=disk)], check=True
    )


def forget_pages(root: Path) -> None:
    """Take what lies below a folder out of the page cache, as it is on a node that has not read it yet."""
    for path in root.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


class Taken(NamedTuple):
    seconds: float
    cpu: float


def measure(copy: Callable[[], None]) -> Taken:
    began, before = time.perf_counter(), os.times()
    copy()
    seconds, after = time.perf_counter() - began, os.times()
    return Taken(seconds, sum(after[:4]) - sum(before[:4]))


@dataclass(frozen=True)
class Source:
    """Where the data is read, and where it really is."""

    title: str
    base: Path
    behind: Path
    renew: Callable[[], None] = lambda: None

    def forget(self) -> None:
        """Nothing of it has been read."""
        os.sync()
        forget_pages(self.behind)
        self.renew()


def ways(source: Source, name: str) -> dict[str, tuple[Callable[[Path], None], Callable[[], None]]]:
    """Each way of copying, and what is done ahead of it."""
    base = source.base

    def by(command: str) -> tuple[Callable[[Path], None], Callable[[], None]]:
        return lambda disk: shell(command, base, name, disk), lambda: None

    def forget() -> None:
        shutil.rmtree(source.behind / ".staged", ignore_errors=True)

    found = {"cp -r": by("cp -r '{source}' '{disk}'")}
    if shutil.which("rsync"):
        found["rsync -a"] = by("rsync -a '{source}' '{disk}'")
    found["tar | tar"] = by("tar -C '{base}' -cf - '{name}' | tar -C '{disk}' -xf -")
    found[FIRST] = (lambda disk: ours(base, name, disk), forget)
    found[LATER] = (lambda disk: ours(base, name, disk), lambda: None)
    return found


def compare(source: Source, name: str, *, disk: Path, rounds: int, tidy: bool) -> dict[str, list[Taken]]:
    """Every way, all taken in turn, each into an empty folder; the kept copy is made once, and then found."""
    turns, chance = list(ways(source, name).items()), random.Random(7)
    taken: dict[str, list[Taken]] = {label: [] for label in [*dict(turns), KEPT]}
    kept = Path(tempfile.mkdtemp(dir=disk))
    source.renew()
    ours(source.base, name, kept, keep=3600)
    for number in range(rounds):
        print(f"{name} files, {source.title}: round {number + 1} of {rounds}", file=sys.stderr)
        chance.shuffle(turns)
        for label, (copy, before) in turns:
            place = Path(tempfile.mkdtemp(dir=disk))
            before()
            source.forget()
            taken[label].append(measure(partial(copy, place)))
            if tidy:
                shutil.rmtree(place)
        source.forget()
        taken[KEPT].append(measure(partial(ours, source.base, name, kept, keep=3600)))
    if tidy:
        shutil.rmtree(kept)
    return taken


def least(taken: list[Taken]) -> float:
    return min(each.seconds for each in taken)


def best_peer(ways: dict[str, list[Taken]]) -> float:
    return min(least(taken) for label, taken in ways.items() if not label.startswith("paceline"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--megabytes", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the source is; else the temporary folder")
    parser.add_argument("--disk", type=Path, help="where copies go; else the same")
    options = parser.parse_args()
    describe("staging")
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="paceline-bench-") as folder,
        tempfile.TemporaryDirectory(dir=options.disk or options.folder, prefix="paceline-bench-") as disk,
    ):
        base = Path(folder) / "scratch" / "bench"
        plant_small(base / "small", options.files)
        plant_large(base / "large", options.megabytes)
        found = {}
        for source in sources(Path(folder), base):
            for name in ("small", "large"):
                found[source.title, name] = compare(
                    source, name, disk=Path(disk), rounds=options.rounds, tidy=name == "large"
                )
    titles = {"small": f"{options.files} small files", "large": f"{options.megabytes} MB in 4 files"}
    report(found, titles)


def sources(folder: Path, base: Path) -> Iterator[Source]:
    yield Source("local", base, base)
    if lacking():
        print(f"without {lacking()} nothing is read through a network file system")
        return
    with closing(NetworkFolder(base.parent, folder / "network")) as network:
        try:
            network.renew()
        except subprocess.CalledProcessError:
            print("nothing can be mounted here: nothing is read through a network file system")
            return
        yield Source("network", network.mount / base.name, base, network.renew)


def report(found: dict[tuple[str, str], dict[str, list[Taken]]], titles: dict[str, str]) -> None:
    rows = []
    for (source, name), ways_taken in found.items():
        for label, taken in ways_taken.items():
            cpu = min(each.cpu for each in taken)
            median = statistics.median(each.seconds for each in taken)
            ratio = f"{best_peer(ways_taken) / least(taken):.1f}x"
            times = [f"{least(taken):.2f} s", f"{median:.2f} s", f"{cpu:.2f} s"]
            rows.append([f"{titles[name]}, {source}", label, *times, ratio])
    show(["data", "way", "least", "median", "CPU", "to the best peer"], rows)
    for (source, name), ways_taken in found.items():
        for label, target in TARGETS[name].items():
            ratio = best_peer(ways_taken) / least(ways_taken[label])
            print(f"{titles[name]}, {source}: {label}: {ratio:.2f}x the best peer (target {target:g}x)")


if __name__ == "__main__":
    main()
