"""What the laptop asks of a login node: a command, the files of its project, and secrets.

It goes through the connection as one line of JSON, and waits there in a file that only its owner can read until the
command takes it. Nothing of it is an argument of a process, which every user of a login node can see.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from paceline.contract.files.sent_code import SentCode

REQUEST = "request-"  # beginning of the name of a file in which a request waits
# the same of an empty file that says that the command of a request has failed by itself
ENDED = "ended-"
ABSENT = 97  # exit code on the login node if this version is not there, or not complete
UNSETTLED = 98  # exit code if the job of the same submission, sent earlier, could not be looked for
SSH_FAILED = 255  # ssh's own exit code if the connection fails or a signal kills the command
WAIT, FOLLOW = "wait", "follow"
# the command that asks what a submission has led to, and withdraws it if nothing
OUTCOME = ("submit", "--outcome")


def end_mark(name: str) -> str:
    """Return the name of the file that says that the command of a request has failed by itself.

    A command that is killed does not write it. Its exit code alone says nothing: if ssh or a wrapper around Python
    makes one up, it looks like any other.
    """
    return f"{ENDED}{name.removeprefix(REQUEST)}"


@dataclass(frozen=True)
class Request:
    args: Sequence[str]  # of `paceline`
    folder: str  # the current folder, relative to the project
    code: SentCode
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_sources: Mapping[str, str] = field(default_factory=dict)
    submission: str = ""  # its id, if the command submits a job
    # whether it submits jobs: if its answer is lost, the same command asks for them first
    submits: bool = False
    awaits: str = ""  # WAIT or FOLLOW: what to do with the run once its answer is here
    # whether the code gets a folder that no other command uses: a job works in it
    own_folder: bool = False

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
    submission: str = ""
    code: str = ""  # the digest of what was sent

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Accepted:
        return cls(**json.loads(text))
