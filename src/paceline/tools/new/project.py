"""Create a project from a template: all of its files, or nothing."""

from __future__ import annotations

import json
import keyword
import os
import re
import shutil
from pathlib import Path

from paceline.errors import EnvironmentProblem, UsageError
from paceline.tools.new.catalogue import FILES, TEMPLATES, Template

MAX_NAME = 64
# Git and the builder of the wheel would obey files with their real names.
COMMON = {
    "paceline.toml": "paceline.toml",
    "README.md": "README.md",
    "env.template": ".env.template",
    "gitignore": ".gitignore",
    "tests/test_train.py": "tests/test_train.py",
}


def find_template(name: str) -> Template:
    if name in TEMPLATES:
        return TEMPLATES[name]
    raise UsageError(
        f"There is no template {name!r}.", hint=f"The templates are {', '.join(TEMPLATES)}."
    )


def check_name(name: str) -> None:
    """Reject what is no good name of a folder, on any system and for any shell."""
    if name.endswith(".py"):
        raise UsageError(
            f"{name!r} is the name of a script, not of a project.",
            hint=f"Choose a new folder, e.g. `paceline new {name[:-3] or 'digits'}`. For an "
            "existing script, use `paceline adopt`.",
        )
    if not re.fullmatch(r"[^\W_][\w.-]*(?<!\.)", name) or len(name) > MAX_NAME:
        raise UsageError(
            f"{name!r} is not a name for a project.",
            hint=f"Use letters, digits, '_', '-' and '.', at most {MAX_NAME}, and begin with a "
            "letter or a digit. To create it elsewhere, `cd` there first. For an existing project, "
            "use `paceline init` and `paceline adopt train.py`.",
        )
    if keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} is a reserved word of Python.", hint=f"Use another, e.g. my-{name}."
        )


def create_project(name: str, template: Template, parent: Path) -> list[str]:
    """Make the folder `name` in `parent`; return its files. If anything fails, nothing is left of
    it.
    """
    check_name(name)
    folder = parent / name
    if os.path.lexists(folder):
        raise UsageError(
            f"A file or folder named {name} already exists.",
            hint="Choose another name; nothing was changed.",
        )
    partial = parent / f".{name[:40]}.{os.urandom(8).hex()}.partial"
    try:
        partial.mkdir()
        written = _fill(partial, name, template)
        os.rename(partial, folder)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise EnvironmentProblem(
            f"Cannot create {folder}: {reason}.",
            hint="Change to a folder that you may write to, with enough space.",
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _fill(folder: Path, name: str, template: Template) -> list[str]:
    for path in template.files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((template.folder / path).read_bytes())
    words = _words(name, template)
    for source, path in COMMON.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (FILES / "common" / source).read_text(encoding="utf-8")
        target.write_text(re.sub(r"@(\w+)@", lambda match: words[match[1]], text), encoding="utf-8")
    return sorted([*template.files, *COMMON.values()])


def _words(name: str, template: Template) -> dict[str, str]:
    """Return what the common files leave open: `@name@` and so on."""
    command = ["train.py", *template.arguments]
    return {
        "name": name,
        "script": json.dumps(command if template.arguments else command[0]),
        "settings": template.settings,
        "title": template.title,
        "reaches": template.reaches,
        "data": template.data,
        "quick": template.quick,
        "result": template.result,
    }
