"""Compare staging with `cp -r`, `rsync -a` and `tar | tar` in one run: many small files, and a few large ones.

    python benchmarks/staging.py [--files 20000] [--megabytes 2000] [--rounds 5] [--folder DIR] [--disk DIR]

The source is in --folder. It is read once locally and once through a network file system, as the nodes of a cluster
read theirs (sshfs from a server on this machine, if it is installed). The copies go to --disk, the node's own disk.

"first job" packs the small files before it copies; "later jobs" read the pack, on any node; "same node, cached" finds the
data in the cache that an earlier job left (`keep`).

When a copy starts, nothing of the source is in the page cache or known to the network client, as on a node that starts
a job. Each copy goes into a folder of its own, after all earlier writes have reached the disk. Small copies stay until
the end: for some minutes after many files were removed, ext4 is slow to create new ones, and the benchmark would
measure that. The methods take turns, in a different order every round, because recently freed memory is faster to
allocate. Only the minimum times are compared: other load on the machine can only add to them. CPU seconds are user and
system time of the copying processes, without the server's.
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

from paceline.staging.cleanup import make_private_folder
from paceline.staging.copy import Transfer
from paceline.staging.request import make_request
from paceline.staging.stager import Stager

from machine import describe, show
from network_folder import NetworkFolder, missing_requirement

FIRST, LATER, CACHED = "paceline, first job", "paceline, later jobs", "paceline, same node, cached"
TARGETS = {"small": {FIRST: 1.0, LATER: 2.0, CACHED: 2.0}, "large": {FIRST: 1.0, LATER: 1.0}}


def make_small_files(root: Path, count: int) -> None:
    """Make a hundred folders of files of a few kilobytes, as in image datasets."""
    generator = random.Random(1)
    for number in range(count):
        folder = root / f"class-{number % 100:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(
            generator.randbytes(generator.randrange(1000, 8000))
        )


def make_large_files(root: Path, megabytes: int) -> None:
    root.mkdir(parents=True)
    block = os.urandom(1_000_000)
    for number in range(4):
        with open(root / f"shard-{number}.tar", "wb") as file:
            for _ in range(megabytes // 4):
                file.write(block)


def stage(base: Path, name: str, disk: Path, *, keep: int = 0) -> None:
    request = make_request({"stage": [name], "keep": keep}, base=base, environ=os.environ)
    private = make_private_folder(disk)
    data = Path(tempfile.mkdtemp(dir=private))
    stager = Stager(request, private=private, data=data, host="here", transfer=Transfer())
    stager.stage()
    stager.close()


def shell(command: str, base: Path, name: str, disk: Path) -> None:
    subprocess.run(
        ["bash", "-c", command.format(source=f"{base}/{name}", base=base, name=name, disk=disk)],
        check=True,
    )


def drop_cached_pages(root: Path) -> None:
    """Drop the files below a folder from the page cache, as on a node that has not read them yet."""
    for path in root.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


class Measurement(NamedTuple):
    seconds: float
    cpu: float


def measure(copy: Callable[[], None]) -> Measurement:
    began, before = time.perf_counter(), os.times()
    copy()
    seconds, after = time.perf_counter() - began, os.times()
    return Measurement(seconds, sum(after[:4]) - sum(before[:4]))


@dataclass(frozen=True)
class Source:
    """Where the data is read, and where it is stored."""

    title: str
    base: Path
    stored: Path
    remount: Callable[[], None] = lambda: None

    def drop_caches(self) -> None:
        """Forget everything that was read."""
        os.sync()
        drop_cached_pages(self.stored)
        self.remount()


def copy_methods(
    source: Source, name: str
) -> dict[str, tuple[Callable[[Path], None], Callable[[], None]]]:
    """Return each method of copying, and what to do before it."""
    base = source.base

    def shell_method(command: str) -> tuple[Callable[[Path], None], Callable[[], None]]:
        return lambda disk: shell(command, base, name, disk), lambda: None

    def remove_packs() -> None:
        shutil.rmtree(source.stored / ".staged", ignore_errors=True)

    methods = {"cp -r": shell_method("cp -r '{source}' '{disk}'")}
    if shutil.which("rsync"):
        methods["rsync -a"] = shell_method("rsync -a '{source}' '{disk}'")
    methods["tar | tar"] = shell_method("tar -C '{base}' -cf - '{name}' | tar -C '{disk}' -xf -")
    methods[FIRST] = (lambda disk: stage(base, name, disk), remove_packs)
    methods[LATER] = (lambda disk: stage(base, name, disk), lambda: None)
    return methods


def compare(
    source: Source, name: str, *, disk: Path, rounds: int, tidy: bool
) -> dict[str, list[Measurement]]:
    """Measure every method in turn, each into an empty folder; the cached copy is made once and then reused."""
    turns, generator = list(copy_methods(source, name).items()), random.Random(7)
    taken: dict[str, list[Measurement]] = {label: [] for label in [*dict(turns), CACHED]}
    cache = Path(tempfile.mkdtemp(dir=disk))
    source.remount()
    stage(source.base, name, cache, keep=3600)
    for number in range(rounds):
        print(f"{name} files, {source.title}: round {number + 1} of {rounds}", file=sys.stderr)
        generator.shuffle(turns)
        for label, (copy, before) in turns:
            folder = Path(tempfile.mkdtemp(dir=disk))
            before()
            source.drop_caches()
            taken[label].append(measure(partial(copy, folder)))
            if tidy:
                shutil.rmtree(folder)
        source.drop_caches()
        taken[CACHED].append(measure(partial(stage, source.base, name, cache, keep=3600)))
    if tidy:
        shutil.rmtree(cache)
    return taken


def minimum(taken: list[Measurement]) -> float:
    return min(each.seconds for each in taken)


def best_peer(ways: dict[str, list[Measurement]]) -> float:
    return min(minimum(taken) for label, taken in ways.items() if not label.startswith("paceline"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--megabytes", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="folder for the source [default: the temporary folder]"
    )
    parser.add_argument("--disk", type=Path, help="folder for the copies [default: the same]")
    options = parser.parse_args()
    describe("staging")
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="paceline-bench-") as folder,
        tempfile.TemporaryDirectory(
            dir=options.disk or options.folder, prefix="paceline-bench-"
        ) as disk,
    ):
        base = Path(folder) / "scratch" / "bench"
        make_small_files(base / "small", options.files)
        make_large_files(base / "large", options.megabytes)
        found = {}
        for source in sources(Path(folder), base):
            for name in ("small", "large"):
                found[source.title, name] = compare(
                    source, name, disk=Path(disk), rounds=options.rounds, tidy=name == "large"
                )
    titles = {
        "small": f"{options.files} small files",
        "large": f"{options.megabytes} MB in 4 files",
    }
    report(found, titles)


def sources(folder: Path, base: Path) -> Iterator[Source]:
    yield Source("local", base, base)
    if missing_requirement():
        print(f"skipping the network file system: {missing_requirement()} is missing")
        return
    with closing(NetworkFolder(base.parent, folder / "network")) as network:
        try:
            network.remount()
        except subprocess.CalledProcessError:
            print("skipping the network file system: cannot mount here")
            return
        yield Source("network", network.mount / base.name, base, network.remount)


def report(
    found: dict[tuple[str, str], dict[str, list[Measurement]]], titles: dict[str, str]
) -> None:
    rows = []
    for (source, name), ways_taken in found.items():
        for label, taken in ways_taken.items():
            cpu = min(each.cpu for each in taken)
            median = statistics.median(each.seconds for each in taken)
            ratio = f"{best_peer(ways_taken) / minimum(taken):.1f}x"
            times = [f"{minimum(taken):.2f} s", f"{median:.2f} s", f"{cpu:.2f} s"]
            rows.append([f"{titles[name]}, {source}", label, *times, ratio])
    show(["data", "method", "minimum", "median", "CPU", "vs. best peer"], rows)
    for (source, name), ways_taken in found.items():
        for label, target in TARGETS[name].items():
            ratio = best_peer(ways_taken) / minimum(ways_taken[label])
            print(
                f"{titles[name]}, {source}: {label}: {ratio:.2f}x the best peer (target {target:g}x)"
            )


if __name__ == "__main__":
    main()
