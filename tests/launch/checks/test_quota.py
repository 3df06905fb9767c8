"""Quotas, as the commands of each file system report them. The commands are fake ones that print the documented
output, because the test machine has no such file system."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.launch.checks import quota
from paceline.launch.checks.quota import Mount, check_quota, mount_of
from tests.launch.slurm.test_commands import put_command

HEADER = (
    "mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:"
    "blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:"
    "filesetname:"
)
FULL = "9:0:9:0:none:9:0:9:0:none"
SOON, PAST = int(time.time()) + 86400, int(time.time()) - 86400


def gpfs(counts: str, *, name: str = "gpfs0", fileset: str = "root") -> str:
    return f"mmlsquota::0:1:::{name}:USR:1001:ann:{counts}:e:on:off:0:{fileset}:"


def of_lustre(row: str) -> dict[str, str]:
    return {"lfs": f"case \"$2 $3\" in '-q -u') cat <<'.'\n{row}\n.\n;; esac"}


def of_gpfs(*rows: str) -> dict[str, str]:
    return {"mmlsquota": "[ \"$*\" = -Y ] && cat <<'.'\n" + "\n".join([HEADER, *rows]) + "\n."}


def of_the_system(row: str) -> dict[str, str]:
    output = (
        "Disk quotas for user ann (uid 1001):\n"
        f"     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n{row}\n"
    )
    return {
        "quota": f"[ \"$1 $2 $3 $4 $5\" = '-u -p -w -f /data' ] && cat <<'.'\n{output}.\nexit 1"
    }


# what the command prints -> level and text of each finding
CASES: dict[str, tuple[str, dict[str, str], list[tuple[str, str]]]] = {
    "lustre: plenty": (
        "lustre",
        of_lustre("/data 1048576 0 104857600 - 908 0 1048576 -"),
        [("good", "1.0 of 100.0 GB")],
    ),
    "lustre: nearly full, on two lines": (
        "lustre",
        of_lustre(
            "/data/a/long/name\n     103809024  0 104857600 - 908 0 1048576 -\n"
            "uid 1001 is using default file quota setting"
        ),
        [("warning", "99.0 of 100.0 GB of the user's quota are used")],
    ),
    "lustre: full": (
        "lustre",
        of_lustre("/data 104857600* 0 104857600 - 908 0 1048576 -"),
        [("problem", "100.0 of 100.0 GB")],
    ),
    "lustre: files, and the amount is uncertain": (
        "lustre",
        of_lustre("/data [1024] 0 104857600 - [1048576] 0 1048576 -"),
        [("problem", "1,048,576 of 1,048,576 files")],
    ),
    "lustre: above the soft limit": (
        "lustre",
        of_lustre("/data 80000000* 70000000 104857600 6d23h59m 9 0 0 -"),
        [("warning", "76.3 of 100.0 GB")],
    ),
    "lustre: above it for too long": (
        "lustre",
        of_lustre("/data 80000000* 70000000 104857600 expired 9 0 0 -"),
        [("problem", "is over")],
    ),
    "lustre: no limits": ("lustre", of_lustre("/data 80000000 0 0 - 9 0 0 -"), []),
    "gpfs: plenty": (
        "gpfs",
        of_gpfs(gpfs("1048576:0:104857600:0:none:4000:0:500000:0:none")),
        [("good", "1.0 of 100.0 GB")],
    ),
    "gpfs: bytes and files": (
        "gpfs",
        of_gpfs(gpfs("104857600:0:104857600:0:none:499999:0:500000:0:none")),
        [("problem", "100.0 of 100.0 GB"), ("warning", "499,999 of 500,000 files")],
    ),
    "gpfs: above the soft limit for too long": (
        "gpfs",
        of_gpfs(gpfs("80000000:70000000:104857600:0:expired:4:0:0:0:none")),
        [("problem", "is over")],
    ),
    "gpfs: other file systems and filesets are full": (
        "gpfs",
        of_gpfs(gpfs(FULL, name="gpfs1"), gpfs(FULL, fileset="z")),
        [],
    ),
    "gpfs: the fileset of the folder": (
        "gpfs",
        of_gpfs(gpfs("9:0:9:0:none:9:0:0:0:none", fileset="scratch")),
        [("problem", "0.0 of 0.0 GB")],
    ),
    "ext or xfs: plenty": (
        "xfs",
        of_the_system("      /dev/sda2  8  51200  61440  0  1  0  0  0"),
        [("good", "0.0 of 0.1 GB")],
    ),
    "nfs: full": (
        "nfs4",
        of_the_system(f"server:/data  61440*  51200  61440  {SOON}  1  0  0  0"),
        [("problem", "0.1 of 0.1")],
    ),
    "nfs: above the soft limit": (
        "nfs4",
        of_the_system(f"server:/data  52000*  51200  61440  {SOON}  1  0  0  0"),
        [("warning", "0.0 of 0.1")],
    ),
    "nfs: above it for too long": (
        "nfs4",
        of_the_system(f"server:/data  52000*  51200  61440  {PAST}  1  0  0  0"),
        [("problem", "is over")],
    ),
    "a command that says something else": (
        "nfs4",
        {"quota": "echo quota: error while getting quota >&2; exit 1"},
        [],
    ),
    "no command": ("lustre", {}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_quota_findings(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, commands, expected = CASES[case]
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        put_command(tmp_path / "bin", name, text)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv(
            "PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin" if commands else str(tmp_path / "bin")
        )
        patch.setattr(quota, "GPFS_BIN", str(tmp_path / "nowhere"))
        found = check_quota(scratch, Mount("/dev/gpfs0", "/data", kind))
    assert [finding.level for finding in found] == [level for level, _ in expected]
    for finding, (_, text) in zip(found, expected, strict=True):
        assert text in finding.text
        assert (finding.hint == "") == (finding.level == "good")


def test_lustre_quotas_of_user_group_and_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_command(
        tmp_path,
        "lfs",
        f'echo "$*" >>{tmp_path}/calls; [ "$1" = project ] && echo " 4711 P $3"; true',
    )
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert check_quota(tmp_path, Mount("mgs:/fs", "/data", "lustre")) == []
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"project -d {tmp_path}",
        f"quota -q -u {os.getuid()} /data",
        f"quota -q -g {tmp_path.stat().st_gid} /data",
        "quota -q -p 4711 /data",
    ]


def test_mount_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    real = tmp_path.resolve()
    mounts.write_text(
        f"/dev/sda1 / ext4 rw 0 0\nmgs:/fs {real.parent} lustre rw 0 0\n/dev/sdb {real}\\040x xfs rw 0 0\n"
    )
    assert mount_of(tmp_path / "below", mounts) == Mount("mgs:/fs", str(real.parent), "lustre")
    assert mount_of(Path("/"), mounts).kind == "ext4"
    assert mount_of(Path(f"{real} x/y"), mounts).kind == "xfs"
    assert mount_of(tmp_path, tmp_path / "absent") == Mount()
