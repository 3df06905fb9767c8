"""Views of a cluster's runs with `--on`. They run here, on a mirror that is updated while there is a connection."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import console, run_command
from paceline.cli.on_cluster import mirror_server, on_cluster
from paceline.cli.on_cluster.on_cluster import Forwarded
from paceline.contract import env
from paceline.contract.files.foreign_records import parse_object
from paceline.errors import ConnectionProblem, PacelineError, UsageError

if TYPE_CHECKING:
    from paceline.spec.clusters import Cluster, ProjectFile
    from paceline.ssh.conversation import Conversation
    from paceline.ssh.mirror.mirror_folder import Mirror
    from paceline.ssh.mirror.reader import Scope
    from paceline.watch.origin import ClusterCopy

NEWEST = 100  # runs that a list mirrors
LITTLE, SOME = 256 << 10, 4 << 20  # bytes of each log, at first
WHOLE_SCREEN = "top"
PATIENCE = 1.5  # seconds without an answer after which a terminal gets a line


def forwarded(asked: Forwarded) -> int:
    """Show runs of the cluster that `--on` names."""
    if len(asked.names) > 1 or asked.names[0] == on_cluster.ALL:
        return on_cluster.forward_to_each(asked, forwarded)
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection
    from paceline.ssh.mirror.cleanup import clean_mirrors
    from paceline.ssh.mirror.mirror_folder import Mirror

    project = on_cluster.find_project(asked)
    cluster = find_cluster(asked.names[0], project)
    scope = _scope(asked)
    if scope is None and Connection(cluster).is_open():
        code = on_cluster.forward(asked)
        if asked.key == "ps":
            renew(asked)
        return code
    mirror = Mirror(mirror_folder(cluster, project))
    mirror.create()
    threading.Thread(target=clean_mirrors, args=(mirror.base.parents[1],), daemon=True).start()
    view = _Show(asked, cluster, mirror)
    return view.show(scope) if scope is not None else view.show_old(Connection(cluster).not_open())


def report_sweep(asked: Forwarded, output: Path) -> int:
    """Write the report of a sweep of the cluster that `--on` names, on this machine."""
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection
    from paceline.ssh.mirror.mirror_folder import Mirror

    project = on_cluster.find_project(asked)
    cluster = find_cluster(asked.names[0], project)
    Connection(cluster).require()
    mirror = Mirror(mirror_folder(cluster, project))
    mirror.create()
    return _Show(asked, cluster, mirror).report_sweep(output)


def renew(asked: Forwarded) -> None:
    """Bring runs up to date that the mirror has as live, as far as that is possible.

    What it shows later, without a connection, does not contradict what the user has just seen or done.
    """
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection
    from paceline.ssh.mirror.mirror_folder import Mirror

    project = on_cluster.find_project(asked)
    cluster = find_cluster(asked.names[0], project)
    mirror = Mirror(mirror_folder(cluster, project))
    with suppress(PacelineError, OSError):
        if mirror.heard().here and Connection(cluster).is_open():
            _Show(asked, cluster, mirror).renew()


@contextmanager
def sign_of_life(cluster: str) -> Iterator[None]:
    """Tell somebody at a terminal that this waits, if it takes long: a slow link, a busy login node, a large log."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(PATIENCE, console.say_for_now, [f"waiting for {cluster} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # its line comes before everything else
        console.wipe()


def mirror_folder(cluster: Cluster, project: ProjectFile) -> Path:
    """Return where the mirror of a cluster is. Projects with scratch folders of their own have their own mirrors."""
    from paceline.ssh.paceline_bundle import cache_folder

    tables = [project.values.get("profiles", {}).get(cluster.name, {}), project.values]
    settings = [table.get("project") for table in tables if isinstance(table, dict)]
    scratch = next(
        (each["scratch"] for each in settings if isinstance(each, dict) and each.get("scratch")), ""
    )
    key = hashlib.sha256(json.dumps([cluster.host, str(scratch)]).encode()).hexdigest()[:12]
    name = cluster.name if re.fullmatch(r"\w[\w.-]{0,60}", cluster.name) else "cluster"
    return cache_folder() / "mirror" / name / key


def _scope(asked: Forwarded) -> Scope | None:
    """Return what a command shows; None if it runs on the cluster."""
    from paceline.ssh.mirror.reader import Scope

    key = asked.key
    if key in ("top", "ui"):
        return Scope(newest=NEWEST, follow=True, log_bytes=LITTLE)
    if key == "report":
        return Scope(_names(asked), log_bytes=SOME)
    return None


def _names(asked: Forwarded) -> list[str]:
    """Return the runs and sweeps that a command names."""
    values = asked.values
    if asked.key in ("ps", "top", "ui") or values.get("active"):
        return [str(values["sweep"])] if values.get("sweep") else []
    return list(values.get("names") or [str(values.get("run") or values.get("name") or "last")])


class _Show:
    """Shows the mirror of a cluster with the command that was typed."""

    def __init__(self, asked: Forwarded, cluster: Cluster, mirror: Mirror) -> None:
        self._asked, self._cluster, self._mirror = asked, cluster, mirror

    def show(self, scope: Scope) -> int:
        from paceline.ssh.mirror.follower import Follower
        from paceline.ssh.mirror.session import update

        if re.fullmatch(r"[1-9]\d{0,4}", seconds := os.environ.get(env.SILENCE, "")):
            scope = replace(scope, silence=float(seconds))
        if not scope.follow:
            try:
                with sign_of_life(self._cluster.name):
                    name, warn = self._cluster.name, console.say_note
                    update(self._mirror, scope, self._connect, cluster=name, warn=warn)
            except ConnectionProblem as problem:
                return self.show_old(problem)
            return self._run(self._view())
        say = (lambda text: None) if self._asked.key == WHOLE_SCREEN else console.say_note
        follower = Follower(
            self._mirror,
            scope,
            self._connect,
            cluster=self._cluster.name,
            say=say,
            warn=console.say_note,
        )
        try:
            try:
                with sign_of_life(self._cluster.name):
                    follower.begin()
            except ConnectionProblem as problem:
                return self.show_old(problem)
            return self._run(self._view())
        finally:
            follower.close()

    def show_old(self, problem: ConnectionProblem) -> int:
        """Show what the mirror has, without a connection. Raises the problem if it has nothing, or nothing can come."""
        from paceline.ssh.connection import Connection
        from paceline.ssh.mirror.follower import show_moment

        heard = self._mirror.heard()
        if not heard.here or self._asked.key == "wait" or self._asked.values.get("follow"):
            raise problem
        is_slow = Connection(self._cluster).is_open()  # there is a connection, and still no answer
        self._require_known(problem if is_slow else None)
        why = problem.message.rstrip(".") if is_slow else f"no connection to {self._cluster.name}"
        said = f"{why}; showing data received until {show_moment(self._last_news())}"
        console.say_note(
            f"{said}. {problem.hint if is_slow else f'To connect: paceline login {self._cluster.name}'}"
        )
        if self._asked.key == "ps":
            console.say_note(
                "only runs that you have watched from here are listed, with the data received last"
            )
        return self._run(self._view())

    def report_sweep(self, output: Path) -> int:
        """Write the report of a sweep, which needs packages that this machine has rather than the login node."""
        from paceline.ssh.mirror.reader import Scope
        from paceline.ssh.mirror.session import update
        from paceline.watch.origin import show

        name = f"{mirror_server.SWEEP}{self._asked.values.get('name') or 'last'}"
        scope = Scope([name], log_bytes=SOME)
        with sign_of_life(self._cluster.name):
            found = update(
                self._mirror,
                scope,
                self._connect,
                cluster=self._cluster.name,
                warn=console.say_note,
            )
        with show(self._view()):
            return run_command(
                ["report", str(self._mirror.folder / found[name]), "-o", str(output)]
            )

    def renew(self) -> None:
        """Bring runs up to date that the mirror has as live, without their logs."""
        from paceline.cli.views.newest_rows import read_newest
        from paceline.ssh.mirror.reader import Scope
        from paceline.ssh.mirror.session import update
        from paceline.watch.origin import show

        folder = self._mirror.folder
        with show(self._view()):
            rows, _ = read_newest(folder, None)
        live = [Path(row.path).relative_to(folder).as_posix() for row in rows if not row.is_over]
        if live:
            update(
                self._mirror,
                Scope(known=live[:NEWEST], logs=False),
                self._connect,
                cluster=self._cluster.name,
            )

    def _require_known(self, problem: PacelineError | None) -> None:
        """Raise an error if the mirror lacks what is named: the problem, or that there is no connection."""
        from paceline.cli import runs
        from paceline.launch.run_folder import RunNotFound
        from paceline.watch.origin import show

        with show(self._view()):
            for name in _names(self._asked):
                try:
                    runs.run_or_sweep(name)
                except RunNotFound:
                    what = "any run" if name == runs.LAST else repr(name)
                    cluster = self._cluster.name
                    raise problem or ConnectionProblem(
                        f"You have not watched {what} from here, and there is no connection to {cluster}.",
                        hint=f"Type: paceline login {cluster}",
                    ) from None
                except UsageError:
                    pass  # the command says what is wrong, such as a name of several runs

    def _last_news(self) -> float:
        """Return when what is shown has come: the run that is named, if one is."""
        from paceline.launch.run_folder import find_run

        heard = self._mirror.heard().here
        with suppress(PacelineError, OSError):
            if self._asked.key != "ps":
                name = next(iter(_names(self._asked)), "last")
                path = find_run(name, self._mirror.folder).path
                came = (
                    self._mirror.refreshed
                    if self._asked.key in ("logs", "report")
                    else self._mirror.seen
                )
                return min(heard, came(path) or heard)
        return heard

    def _run(self, view: ClusterCopy) -> int:
        from paceline.watch.origin import show

        with show(view):
            return run_command(self._asked.line)

    def _view(self) -> ClusterCopy:
        from paceline.watch.origin import ClusterCopy

        return ClusterCopy(self._cluster.name, self._mirror.base, self._act)

    def _connect(self) -> Conversation:
        return self._converse([mirror_server.STREAM])

    def _converse(self, args: list[str]) -> Conversation:
        line = ["mirror-server", *args]
        config = {"config": self._asked.values.get("config")}
        return on_cluster.converse(Forwarded(self._asked.names, "mirror_server", line, config))

    def _act(self, verb: str, run: str) -> str:
        """Do something to a run, on the cluster; return what was done there."""
        with self._converse([mirror_server.ACT, verb, run]) as talk:
            said = talk.output.read()
            code, errors = talk.close(), talk.errors.strip()
        try:
            answer = parse_object(said)
        except ValueError:
            answer = {
                "error": errors.splitlines()[0].removeprefix("paceline: error: ")
                if errors
                else f"exit code {code}"
            }
        if "done" not in answer:
            raise UsageError(f"{self._cluster.name}: {answer.get('error')}")
        return str(answer["done"])
