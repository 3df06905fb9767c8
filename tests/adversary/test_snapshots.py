"""Code snapshots on shared disks: who can read them, which secrets they leave out, and whether they can be trusted."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from paceline.launch.code_snapshot import Snapshot, is_secret, list_code
from paceline.staging.working_directory import WorkingDirectory
from tests.adversary.second_user import (
    OWNER,
    STRANGER,
    call_as,
    needs_two_users,
    run_as,
    shared_folder,
)

MB = 2**20
MODES = {
    "private.py": 0o600,
    "group.py": 0o640,
    "open.py": 0o644,
    "run.sh": 0o755,
    "closed/open.py": 0o644,
}


def make_project(folder: Path) -> Path:
    project = folder / "project"
    (project / "closed").mkdir(parents=True)
    for name, mode in MODES.items():
        (project / name).write_text(f"# {name}\n")
        (project / name).chmod(mode)
    (project / "closed").chmod(0o700)
    project.chmod(0o755)
    return project


def take(project: Path, *, limit: int = MB) -> Snapshot:
    return list_code(project, limit=limit).store(project.parent / "scratch" / "code")


def modes(folder: Path) -> dict[str, int]:
    return {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("", "closed", *MODES)}


# -- who can read them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_copies_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    project = make_project(tmp_path)
    before = os.umask(umask)
    try:
        copy = take(project).path
        work = WorkingDirectory(
            str(tmp_path / "run" / "work" / "project"), str(copy), str(project), frozenset()
        )
        work.fill(work.path)
    finally:
        os.umask(before)
    for folder in (copy, Path(work.path)):
        assert not any(mode & 0o077 for mode in modes(folder).values())
    assert all(modes(copy)[name] & 0o222 == 0 for name in MODES), "copies are read-only"
    assert modes(Path(work.path))["run.sh"] == 0o700
    assert modes(Path(work.path))["private.py"] == 0o600, "the script may write to its own copy"


@needs_two_users
def test_a_stranger_reads_no_copy() -> None:
    """Scratch is open to all."""
    with shared_folder() as shared:
        store = shared / "scratch" / "code"
        project = make_project(shared)
        for path in (project, *project.rglob("*")):
            path.chmod(0o755)
        call_as(OWNER, lambda: print(list_code(project, limit=MB).store(store)))
        assert run_as(STRANGER, ["ls", str(store)]).returncode == 0
        copy = next(store.iterdir())
        assert run_as(OWNER, ["cat", str(copy / "open.py")]).returncode == 0
        assert run_as(STRANGER, ["cat", str(copy / "open.py")]).returncode != 0


# -- secrets -----------------------------------------------------------------------------------------------

SECRETS = """
.env .env.local .env.production prod.env config/prod.env .ENV .envrc .netrc _netrc .pypirc .npmrc .git-credentials
server.pem tls.key certs/tls.p12 app.pfx app.jks putty.ppk passwords.kdbx id_rsa id_rsa.old id_dsa id_ed25519 id_ecdsa
credentials credentials.json credentials.toml gcp-credentials.json google_credentials.json client_secret_123.json
service-account.json my-service-account-key.json service_account.json secrets.toml secrets.yaml secrets.yml secrets.json
secrets.env secrets.ini .streamlit/secrets.toml secret.txt .secrets .aws/credentials .aws/config .kube/config
.ssh/config .docker/config.json .azure/x.json .config/gcloud/application_default_credentials.json .config/gh/hosts.yml
wandb/settings .config/wandb/settings wandb_credentials.txt kaggle.json .kaggle/kaggle.json hf_token hf_token.txt
token.txt x.token api_key.txt openai_api_key.txt .pgpass .my.cnf .htpasswd .s3cfg .boto .vault-token prod.tfvars
.env~ .netrc~ .netrc.bak .env.bak credentials.json.old password.txt passwords.txt db_password.txt aws_credentials
credentials-prod.yaml api-key.txt secret_key.txt wandb_key.txt .wandb_key openai-api-key gcp-key.json google_key.json
secrets/prod.yaml deploy/secrets/a/b.json kubeconfig kubeconfig.yaml prod.kubeconfig terraform.tfstate
terraform.tfstate.backup
"""
CODE = """
train.py secrets.py credentials.py package/tokens.py tokenizer.json tokens.json special_tokens_map.json keys.py key.txt
.env.example .env.sample .env.template example.env id_rsa.pub docs/secrets.md docs/credentials.rst settings.json
config.json docker/config.json wandb/run.py environment.yml env.yaml monkey.png keyboard.txt token_counts.csv
train.py~ secrets.py~ secrets.py.bak package/secrets/__init__.py secrets/README.md passwords.py password_strength.txt
label_key.json keys.json answer_key.txt monkey.txt donkey.json main.tf secretary.txt notes.txt~ compass.txt
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_files_that_look_like_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", CODE.split())
def test_files_that_do_not(name: str) -> None:
    assert not is_secret(name)


def test_a_snapshot_leaves_secrets_out_and_names_them(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    secrets = {"prod.env", ".envrc", ".aws/credentials", ".docker/config.json"}
    for name in secrets:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("hush")
    assert set(list_code(project, limit=MB).skipped_secrets) == secrets
    taken = take(project)
    assert {
        path.relative_to(taken.path).as_posix() for path in taken.path.rglob("*") if path.is_file()
    } == set(MODES)


# -- trust -------------------------------------------------------------------------------------------------


def damage_byte(copy: Path) -> None:
    (copy / "open.py").chmod(0o644)
    (copy / "open.py").write_text("# opEn.py\n")


def truncate(copy: Path) -> None:
    os.truncate(copy / "run.sh", 0)


def remove_file(copy: Path) -> None:
    """As scratch file systems do after 30 days."""
    (copy / "closed" / "open.py").unlink()


def remove_folder(copy: Path) -> None:
    remove_file(copy)
    (copy / "closed").rmdir()


def add_module(copy: Path) -> None:
    (copy / "torch.py").write_text("raise SystemExit('planted')")


def replace_by_link(copy: Path) -> None:
    (copy / "private.py").unlink()
    (copy / "private.py").symlink_to("/etc/passwd")


def replace_folder_by_link(copy: Path) -> None:
    (copy / "closed").rename(copy.parent.parent / "elsewhere")
    (copy / "closed").symlink_to(copy.parent.parent / "elsewhere")


def replace_by_folder(copy: Path) -> None:
    (copy / "private.py").unlink()
    (copy / "private.py").mkdir()
    (copy / "private.py" / "x").touch()


def replace_by_pipe(copy: Path) -> None:
    (copy / "private.py").unlink()
    os.mkfifo(copy / "private.py")


def widen(copy: Path) -> None:
    (copy / "private.py").chmod(0o666)
    (copy / "closed").chmod(0o777)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "damage",
    [
        damage_byte,
        truncate,
        remove_file,
        remove_folder,
        add_module,
        replace_by_link,
        replace_folder_by_link,
        replace_by_folder,
        replace_by_pipe,
        widen,
    ],
)
def test_a_damaged_copy_is_repaired(tmp_path: Path, damage: object) -> None:
    project = make_project(tmp_path)
    first = take(project)
    expected = modes(first.path)
    damage(first.path)  # type: ignore[operator]
    again = take(project)
    assert again.path == first.path
    assert modes(again.path) == expected
    files = {
        path.relative_to(again.path).as_posix(): path
        for path in again.path.rglob("*")
        if path.is_file()
    }
    assert {name: path.read_text() for name, path in files.items()} == {
        name: f"# {name}\n" for name in MODES
    }
    assert not any(path.is_symlink() for path in again.path.rglob("*"))
    assert [path.name for path in again.path.parent.iterdir()] == [first.path.name]


def test_byte_code_in_a_copy_is_no_damage(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    copy = take(project).path
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "x.pyc").touch()
    take(project)
    assert (copy / "__pycache__" / "x.pyc").exists()


@needs_two_users
def test_a_copy_of_another_user_is_not_used(tmp_path: Path) -> None:
    """They could change it after it was verified."""
    with shared_folder() as shared:
        store = shared / "scratch" / "code"
        project = make_project(shared)
        for path in (project, *project.rglob("*")):
            path.chmod(0o755)

        def use() -> None:
            list_code(project, limit=MB).store(store)
            store.chmod(0o1777)

        call_as(STRANGER, use)
        theirs = next(store.iterdir())
        call_as(OWNER, lambda: print(list_code(project, limit=MB).store(store)))
        (ours,) = (path for path in store.iterdir() if path != theirs)
        assert ours.stat().st_uid == OWNER
        shutil.rmtree(ours)
        call_as(STRANGER, lambda: print(shutil.copytree(theirs, ours)))

        def refuse() -> None:
            with pytest.raises(PermissionError):
                list_code(project, limit=MB).store(store)

        call_as(OWNER, refuse)
