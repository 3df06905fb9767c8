"""What the laptop asks of a login node: a command, the files of its project, and secrets.

It goes through the connection as one line of JSON, and waits there in a file that only its owner can read until the
command takes it. Nothing of it is an argument of a process, which every user of a login node can see.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from paceline.contract.files.sent_code import SentCode


@dataclass(frozen=True)
class Request:
    args: Sequence[str]  # of `paceline`
    folder: str  # the current folder, relative to the project
    code: SentCode
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_sources: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        values = json.loads(text)
        return cls(**{**values, "code": SentCode.from_json(json.dumps(values["code"]))})


@dataclass(frozen=True)
class Accepted:
    """What a waiting request needs to be carried out."""

    args: Sequence[str]
    cwd: str
    variables: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    secret_sources: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Accepted:
        return cls(**json.loads(text))
