"""Another machine in a folder: Debian 13 with Slurm 24.11, OpenMPI 5, Apptainer and Python 3.13, created once.

`python -m tests.debian13.root` makes it, and says where it is; `rm -r` of that folder is all that removing it takes.
Beside it is a container's image, as a folder: the same Debian with torch, and with nothing of Slurm or Paceline.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
SUITE = "trixie"
# Debian's own torch: 2.6 is the oldest that Paceline works with.
IN_THE_IMAGE = ["python3", "python3-torch", "python3-numpy"]
IN_THE_ROOT = [
    "slurmctld",
    "slurmd",
    "slurm-client",
    "munge",
    "slurm-wlm-basic-plugins",
    "iproute2",
    "openmpi-bin",
    "python3-pydantic",
    "python3-typer",
    "python3-rich",
    "python3-psutil",
    "python3-pytest",
    "python3-pytest-timeout",
]
CONTAINERS, CONTAINERS_SUITE = ["apptainer"], "sid"  # no release of Debian has it
NEEDED = ["debootstrap", "apt-get", "unshare", "pivot_root", "mount"]


class CannotMake(Exception):
    """The root cannot be created here; the message says why."""


class Root:
    """The folder that holds both."""

    def __init__(self, folder: Path) -> None:
        self.system = folder / "root"
        self.image = folder / "image"

    def command(self, *args: str) -> list[str]:
        """A command, as it is started from outside."""
        repository = HERE.parent.parent
        return [str(HERE / "enter.sh"), str(self.system), str(repository), str(self.image), *args]


def find_or_make() -> Root:
    """Return the root, created if missing. It is renamed into place once complete."""
    if os.geteuid() != 0:
        raise CannotMake("only root can make and enter another root")
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if lacking := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        raise CannotMake(f"not installed: {' '.join(lacking)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline-tests"
    # Whatever makes it another root is in this file.
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"{SUITE}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / "lock"):
        if not folder.exists():
            partial = cache / f"{SUITE}-{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            try:
                _make(Root(partial))
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return Root(folder)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(made: Root) -> None:
    mirror = _mirror()
    _call("debootstrap", "--variant=minbase", SUITE, str(made.image), mirror)
    _install(made.image, IN_THE_IMAGE)
    _let_torchrun_work(made.image)
    _call("cp", "-a", "--reflink=auto", str(made.image), str(made.system))
    _install(made.system, IN_THE_ROOT)
    # Only this package is from elsewhere; its dependencies are from this release.
    apt = made.system / "etc/apt"
    (apt / "sources.list.d/other.list").write_text(
        f"deb [check-valid-until=no] {mirror} {CONTAINERS_SUITE} main\n"
    )
    (apt / "preferences.d/other").write_text(
        f"Package: *\nPin: release n={CONTAINERS_SUITE}\nPin-Priority: 50\n"
    )
    _call("chroot", str(made.system), "apt-get", "update", "-q")
    _install(made.system, CONTAINERS)
    # Root of a virtual machine or an outer container may lack some of the powers that the engine would hand on.
    settings = made.system / "etc/apptainer/apptainer.conf"
    text = settings.read_text()
    full, none = "root default capabilities = full", "root default capabilities = no"
    assert full in text, f"{settings} is not as it was"
    settings.write_text(text.replace(full, none))
    (made.system / "etc/hosts").write_text("127.0.0.1 localhost newer\n")


def _let_torchrun_work(image: Path) -> None:
    """Debian's torch is built without libuv, but its torchrun requires it."""
    distributed = image / "usr/lib/python3/dist-packages/torch/distributed"
    for name, args in {
        "elastic/rendezvous/static_tcp_rendezvous.py": "multi_tenant=True,",
        "elastic/rendezvous/c10d_rendezvous_backend.py": "multi_tenant=True,",
        "rendezvous.py": "is_master=False,",
    }.items():
        text = (distributed / name).read_text(encoding="utf-8")
        assert args in text, f"{name} is not as it was"
        (distributed / name).write_text(
            text.replace(args, f"{args} use_libuv=False,"), encoding="utf-8"
        )


def _mirror() -> str:
    """Where this machine's own packages come from."""
    targets = _call(
        "apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Component: main"
    )
    mirrors = [line for line in targets.splitlines() if line.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise CannotMake("apt knows no mirror of Debian")
    return mirrors[0]


def _install(folder: Path, packages: list[str]) -> None:
    _call(
        "chroot",
        str(folder),
        "apt-get",
        "install",
        "-y",
        "-q",
        "--no-install-recommends",
        *packages,
    )
    _call("chroot", str(folder), "apt-get", "clean")


def _call(*args: str) -> str:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    environ["PATH"] = f"{environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    done = subprocess.run(args, env=environ, text=True, capture_output=True, errors="replace")
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise CannotMake(f"{' '.join(args)} failed:\n{tail}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(find_or_make().system)
    except CannotMake as problem:
        sys.exit(f"{problem}")
