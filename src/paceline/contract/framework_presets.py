"""The stop contract of scripts without the runtime: a signal that asks them to save, an exit code
that says they did.

Both are settings (`[resume] stop_signal` and `saved_exit_code`). A preset is what a framework does
by itself, and applies where nothing is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.contract.verdict import STOPPED_EXIT

PLAIN_SIGNAL = "SIGUSR1"
SIGNALS = (PLAIN_SIGNAL, "SIGTERM", "SIGINT", "SIGHUP")  # SIGUSR2 writes stacks


@dataclass(frozen=True)
class Preset:
    """A framework that handles a signal itself: it saves, and the script ends with this exit
    code.
    """

    name: str
    modules: tuple[str, ...]  # a rank that imports one of them uses the framework
    packages: tuple[str, ...]  # what its scripts import
    mentions: str  # what a script that uses the framework contains
    resumes: str  # the argument with which a script resumes by itself
    stop_signal: str = "SIGTERM"
    saved_exit_code: int = 0

    def fits(self, source: str, packages: Iterable[str]) -> bool:
        """Whether a module with this text, which imports these packages, uses the framework."""
        return (
            not set(self.packages).isdisjoint(packages)
            and re.search(self.mentions, source) is not None
        )

    def can_resume(self, sources: Iterable[str], args: Iterable[str]) -> bool:
        """Whether a program seems to resume by itself. If not, stopping it early would only make
        it start over.
        """
        return any(self.resumes in text for text in (*sources, *args))


# In the order of precedence. Accelerate has no handler: its scripts are plain.
PRESETS = (
    Preset(
        "Lightning Trainer",
        modules=("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        packages=("lightning", "pytorch_lightning"),
        mentions=r"\b(Trainer|LightningCLI)\b",
        resumes="ckpt_path",
    ),
    Preset(
        "Hugging Face Trainer",
        modules=("transformers.trainer",),
        packages=("transformers", "trl", "sentence_transformers"),
        mentions=r"\b\w*Trainer\b",
        resumes="resume_from_checkpoint",
    ),
)


def describe(stop_signal: str, codes: Sequence[int], why: str = "") -> str:
    """Return the contract in one line."""
    meaning = " or ".join(str(code) for code in sorted({*codes, STOPPED_EXIT}))
    return (
        f"{stop_signal}{f' ({why})' if why else ''}; exit code {meaning} means that it has "
        "saved and can be resumed"
    )


def describe_contract(stop_signal: str, saved_exit_code: int, preset: Preset | None) -> str:
    """Return what applies: settings first, then the preset."""
    codes = [saved_exit_code]
    if stop_signal:
        return describe(stop_signal, codes, "set")
    if preset is None:
        return describe(PLAIN_SIGNAL, codes)
    return describe(
        preset.stop_signal, [*codes, preset.saved_exit_code], f"preset of the {preset.name}"
    )
