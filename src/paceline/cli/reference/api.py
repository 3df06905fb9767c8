"""The page about the runtime: `paceline.session`, every attribute and method of `Run`, and the other public names."""

from __future__ import annotations

from collections.abc import Iterator

from paceline import _NAMES
from paceline.cli.reference import docstrings
from paceline.cli.reference.docstrings import Callable
from paceline.cli.reference.entries import ROW, Entry, Page, Section

RUN = ("runtime/run.py", "Run")
# What `Run` takes over from its parts.
PARTS = {"runtime/training/gradients.py": ("Gradients", ("autocast", "backward", "update"))}
_APART = ("Run", "session", "PacelineError")


def make_page() -> Page:
    intro = (
        "What a script imports: `import paceline`. The [runtime guide](../runtime.md) shows how to use it. "
        "In a terminal, `paceline reference run.wrap` prints an entry of this page."
    )
    sections = [_session(), _attributes(), _methods(), _others()]
    return Page("api.md", "Runtime API", intro, sections)


def _session() -> Section:
    made = docstrings.read_callable("runtime/session.py", "session")
    defaults = dict(
        part.split("=", 1) for part in made.signature.strip("()").split(", ") if "=" in part
    )
    entries = [
        Entry((name, f"session.{name}"), text, (("default", f"`{defaults.get(name, '')}`"),))
        for name, text in docstrings.read_fields(made.docstring, "Args:").items()
    ]
    raised = docstrings.read_fields(made.docstring, "Raises:")
    intro = (
        docstrings.body(made.docstring)
        + "\n\nRaises:\n\n"
        + "\n".join(f"- `{n}`: {t}" for n, t in raised.items())
    )
    return Section(
        "paceline.session", ("session", "paceline.session"), intro, entries=tuple(entries)
    )


def _attributes() -> Section:
    text = docstrings.class_docstring(*RUN)
    listed = docstrings.read_fields(text, "Attributes:")
    entries = [
        _named(name.strip(), meaning)
        for names, meaning in listed.items()
        for name in names.split(",")
        if name.strip() not in _taken_over()
    ]
    known = {entry.names[0] for entry in entries}
    for each in docstrings.read_members(*RUN):
        if each.is_property and f"run.{each.name}" not in known:
            entries.append(_named(each.name, " ".join(each.docstring.split())))
    return Section("Attributes of Run", ("Run",), docstrings.body(text), entries=tuple(entries))


def _named(name: str, meaning: str) -> Entry:
    return Entry((f"run.{name}", f"Run.{name}", name), meaning, ROW)


def _taken_over() -> set[str]:
    return {name for _, names in PARTS.values() for name in names}


def _methods() -> Section:
    found = [each for each in docstrings.read_members(*RUN) if not each.is_property]
    for file, (kind, names) in PARTS.items():
        found += [each for each in docstrings.read_members(file, kind) if each.name in names]
    entries = [
        _call(each, "run.", (f"run.{each.name}", f"Run.{each.name}", each.name)) for each in found
    ]
    return Section("Methods of Run", entries=tuple(entries))


def _others() -> Section:
    entries = []
    for name, module in _NAMES.items():
        if name not in _APART:
            file = f"{module.removeprefix('paceline.').replace('.', '/')}.py"
            made = docstrings.read_callable(file, name)
            entries.append(
                _call(
                    made,
                    "paceline.",
                    (f"paceline.{name}", name),
                    members=tuple(_members(file, name)),
                )
            )
    return Section("Other names", entries=tuple(entries))


def _members(file: str, name: str) -> Iterator[Callable]:
    if name[0].isupper():
        yield from docstrings.read_members(file, name)


def _call(
    made: Callable, owner: str, names: tuple[str, ...], members: tuple[Callable, ...] = ()
) -> Entry:
    parts = [
        f"```python\n{owner}{made.name}{made.signature}\n```",
        docstrings.to_markdown(made.docstring),
    ]
    if members:
        lines = [
            f"- `{each.name}{each.signature}`: {' '.join(docstrings.body(each.docstring).split())}"
            for each in members
        ]
        parts.append("\n".join(lines))
    return Entry(names, "\n\n".join(parts))
