"""Names of files that usually hold secrets. Code snapshots lie on shared disks, so they leave
these out.
"""

from __future__ import annotations

import fnmatch
import functools
import re

# Any file of this name, in any folder and any case.
_FILES = (
    # variables
    ".env",
    ".env.*",
    ".env-*",
    ".env_*",
    "*.env",
    ".envrc",
    ".envrc.*",
    "*.tfvars",
    "*.tfstate",
    "*.tfstate.*",
    # private keys and stores of keys
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.ppk",
    "*.kdb",
    "*.kdbx",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    # logins of programs
    ".netrc",
    "_netrc",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    ".pgpass",
    ".my.cnf",
    ".htpasswd",
    ".s3cfg",
    ".boto",
    ".dockercfg",
    ".dockerconfigjson",
    ".vault-token",
    "kaggle.json",
    "rclone.conf",
    "kubeconfig",
    "kubeconfig.*",
    "*.kubeconfig",
    # whatever says so
    "credentials*",
    "*credentials.json",
    "*[_-]credentials",
    "*[_-]credentials.*",
    "client_secret*.json",
    "*service-account*.json",
    "*service_account*.json",
    "*serviceaccount*.json",
    "secret",
    "secret.*",
    "secrets",
    "secrets.*",
    ".secrets",
    ".secrets.*",
    "token",
    ".token",
    "token.txt",
    "*.token",
    "*_token",
    "*_token.txt",
    "api[_-]key*",
    "apikey*",
    "*[_-]key",
    "*[_-]key.txt",
    "*gcp[_-]key*.json",
    "*google[_-]key*.json",
    "password",
    "passwords",
    "password.*",
    "passwords.*",
    "*[_-]password.txt",
    "*[_-]passwords.txt",
)

# What editors and people append to the name of a copy.
_COPY = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save))+$")

# Everything in folders of this name.
_FOLDERS = (".aws", ".azure", ".gcloud", ".kaggle", ".kube", ".ssh", ".gnupg", ".secrets")

# The same, but for code and documentation: packages have such names too.
_NAMED_FOLDERS = ("secrets",)

# Files by the end of their path.
_PATHS = (
    "*/.docker/config.json",
    "*/.config/gcloud/*",
    "*/gh/hosts.yml",
    "*/wandb/settings",
    "*/.config/containers/auth.json",
)

# Templates, public keys, code and documentation are not secret, whatever they are called.
_HARMLESS = ("example.*", "sample.*", "template.*", ".env.example.*", "answer[_-]key*")
_HARMLESS_ENDS = (
    ".example",
    ".sample",
    ".template",
    ".dist",
    ".pub",
    ".py",
    ".pyi",
    ".ipynb",
    ".sh",
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".h",
    ".md",
    ".rst",
    ".html",
)


def is_secret(path: str) -> bool:
    """Return whether a file, by its path in a project, usually holds secrets."""
    *folders, name = path.lower().split("/")
    if any(folder in _FOLDERS for folder in folders):
        return True
    below = "/".join([*folders[-2:], name])
    if matches(f"/{below}", _PATHS):
        return True
    original = _COPY.sub("", name)
    if original.endswith(_HARMLESS_ENDS):  # first, because most files are code
        return False
    named = any(folder in _NAMED_FOLDERS for folder in folders)
    looks_so = named or any(matches(each, _FILES) for each in {name, original})
    return looks_so and not matches(original, _HARMLESS)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name matches one of these shell patterns."""
    return _expression(patterns).match(name) is not None


@functools.lru_cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
