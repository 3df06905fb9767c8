"""Names of files that usually hold secrets. Code snapshots lie on shared disks, so they leave these out."""

from __future__ import annotations

import fnmatch
import functools
import re

# Any file of this name, in any folder and any case.
_FILES = (
    # variables
    ".env", ".env.*", ".env-*", ".env_*", "*.env", ".envrc", ".envrc.*", "*.tfvars",
    # private keys and stores of keys
    "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdb", "*.kdbx",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    # logins of programs
    ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".pgpass", ".my.cnf", ".htpasswd", ".s3cfg", ".boto",
    ".dockercfg", ".dockerconfigjson", ".vault-token", "kaggle.json", "rclone.conf",
    # whatever says so
    "credentials", "credentials.*", "*credentials.json", "*_credentials.*", "*-credentials.*",
    "client_secret*.json", "*service-account*.json", "*service_account*.json", "*serviceaccount*.json",
    "secret", "secret.*", "secrets", "secrets.*", ".secrets", ".secrets.*",
    "token", ".token", "token.txt", "*.token", "*_token", "*_token.txt",
    "api_key*", "apikey*", "*_api_key", "*_api_key.txt",
)  # fmt: skip

# Everything in folders of this name.
_FOLDERS = (".aws", ".azure", ".gcloud", ".kaggle", ".kube", ".ssh", ".gnupg", ".secrets")

# Files by the end of their path.
_PATHS = (".docker/config.json", ".config/gcloud/*", "gh/hosts.yml", "wandb/settings", ".config/containers/auth.json")

# Templates, public keys, code and documentation are not secret, whatever they are called.
_HARMLESS = (
    "*.example", "*.sample", "*.template", "*.dist", "example.*", "sample.*", "template.*", ".env.example.*",
    "*.pub", "*.py", "*.pyi", "*.ipynb", "*.sh", "*.c", "*.cc", "*.cpp", "*.cu", "*.h", "*.md", "*.rst", "*.html",
)  # fmt: skip


def is_secret(path: str) -> bool:
    """Return whether a file, by its path in a project, usually holds secrets."""
    *folders, name = path.lower().split("/")
    if any(folder in _FOLDERS for folder in folders):
        return True
    below = "/".join([*folders[-2:], name])
    if any(fnmatch.fnmatchcase(f"/{below}", f"*/{pattern}") for pattern in _PATHS):
        return True
    return matches(name, _FILES) and not matches(name, _HARMLESS)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _combine(patterns).match(name) is not None


@functools.lru_cache
def _combine(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compile shell patterns into one expression: thousands of names are matched against dozens of them."""
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)")
