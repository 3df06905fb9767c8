"""The run folder on the other side, as this side asks for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.files.foreign_records import make
from paceline.contract.run_path import is_run_id, is_run_path
from paceline.errors import ConnectionProblem, EnvironmentProblem, UsageError
from paceline.ssh.conversation import Conversation
from paceline.ssh.fetch.contents import Contents, RemoteFile
from paceline.ssh.fetch.frames import MAX_LINE, TooLong, read_frame, read_line, write_line


@dataclass(frozen=True)
class Listing:
    folder: str  # on the other side
    key: str  # what commands call the run
    run_path: tuple[str, ...]  # project, experiment and run id
    status: str
    contents: Contents


@dataclass(frozen=True)
class Arrival:
    """A file that is about to arrive. `error` says why it does not; one that `is_gone` was removed meanwhile."""

    name: str
    size: int = 0
    mtime_ns: int = 0
    offset: int = 0
    error: str = ""
    is_gone: bool = False


class RemoteFiles:
    def __init__(self, talk: Conversation) -> None:
        self._talk = talk

    def list(self, what: str, skip: Collection[str] = ()) -> Listing:
        """Ask what there is to fetch. Raises the error of the other side, such as that there is no such run."""
        answer = self._ask({"list": what, "skip": sorted(skip)})
        if "error" in answer:
            kind = UsageError if answer.get("usage") else EnvironmentProblem
            raise kind(str(answer["error"]), hint=str(answer.get("hint", "")))
        try:
            listing = _read_listing(answer)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self.nonsense("a list of files that cannot be read") from None
        if not is_named_as_run(listing.run_path, listing.key):
            cluster = self._talk.connection.cluster.name
            raise EnvironmentProblem(
                f"{cluster} listed a folder whose name is not that of a run: {listing.folder!r}.",
                hint="Nothing was fetched. If you renamed or moved the run folder, restore its path:"
                " PROJECT/EXPERIMENT/RUN-ID.",
            )
        return listing

    def send(self, offsets: Mapping[str, int]) -> Iterator[Arrival]:
        """Ask for files from these offsets on. Read the `parts` and the `end` of each that has no error."""
        write = {"send": list(offsets.items())}
        try:
            write_line(self._talk.input, write)
        except ConnectionError:
            raise self._lost() from None
        for name, offset in offsets.items():
            try:
                arrival = make(Arrival, self._read())
            except (ValueError, TypeError):
                raise self.nonsense("a file without a name") from None
            if arrival.name != name:
                raise self.nonsense(f"{arrival.name!r} instead of {name!r}")
            if arrival.offset not in (0, offset) or not _is_possible(arrival):
                raise self.nonsense(f"an impossible part of {name!r}")
            yield arrival

    def parts(self) -> Iterator[bytes]:
        while part := self._guarded(lambda: read_frame(self._talk.output)):
            yield part

    def end(self) -> dict[str, Any]:
        """Return the checksum of the whole file and its size; `changed` or an `error` if that is not what was sent."""
        return self._read()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            write_line(self._talk.input, question)
        except ConnectionError:
            pass  # the answer says why
        return self._read()

    def _read(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._guarded(lambda: read_line(self._talk.output))
        return answer

    def _guarded(self, read: Any) -> Any:
        try:
            return read()
        except TooLong:
            self._talk.end()
            raise self._talk.connection.too_long(MAX_LINE) from None
        except (EOFError, ConnectionError):
            raise self._lost() from None

    def nonsense(self, what: str) -> EnvironmentProblem:
        """Return an error: the other side does not keep to what was agreed."""
        cluster = self._talk.connection.cluster.name
        return EnvironmentProblem(
            f"{cluster} sent {what}.", hint="Nothing of that was kept. Ask who runs the cluster."
        )

    def _lost(self) -> ConnectionProblem:
        cluster = self._talk.connection.cluster.name
        self._talk.close()
        said = [line for line in self._talk.errors.splitlines() if line.strip()][-1:]
        return ConnectionProblem(
            f"The connection to {cluster} was lost{f': {said[0]}' if said else ''}.",
            hint=f"What has arrived is kept. Log in again if needed (paceline login {cluster}), then repeat the"
            " command: it continues from there.",
        )


def _read_listing(answer: dict[str, Any]) -> Listing:
    """Raises ValueError, TypeError, KeyError or AttributeError if the answer is no listing."""
    files = [make(RemoteFile, each) for each in answer["files"]]
    checkpoints, left, run_path = (
        list(answer["checkpoints"]),
        dict(answer["left"]),
        tuple(answer["run_path"]),
    )
    unreadable = dict(answer["unreadable"])
    texts = [
        answer["folder"],
        answer["status"],
        *answer["skipped"],
        *left,
        *unreadable,
        *unreadable.values(),
    ]
    if not all(isinstance(each, str) for each in texts) or not all(
        isinstance(each, int) for each in left.values()
    ):
        raise ValueError
    if not all(_is_plain(each) for each in (answer["key"], *run_path)):
        raise ValueError
    if any(checkpoint_step(each) is None for each in checkpoints):
        raise ValueError
    if not all(_is_possible(each) for each in files):
        raise ValueError
    contents = Contents(files, checkpoints, left, answer["skipped"], unreadable)
    return Listing(answer["folder"], answer["key"], run_path, answer["status"], contents)


def is_named_as_run(run_path: tuple[str, ...], key: str) -> bool:
    """Return whether a folder here may have these names. The other side chooses them, and others run what they hold.

    A folder called `.git` next to your files, for example, holds commands for git.
    """
    if not is_run_path("/".join(run_path)):
        return False
    return (
        is_run_id(key) and key == run_path[-1]
        if len(run_path) == 3
        else key == f"{run_path[2]}-{run_path[4]}"
    )


def _is_plain(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
    )


def _is_possible(file: RemoteFile | Arrival) -> bool:
    return file.size >= getattr(file, "offset", 0) >= 0 and abs(file.mtime_ns) < 1 << 62
