"""An empty torch, for runs of scripts that do not use it: importing the real one takes seconds."""

from __future__ import annotations

from pathlib import Path

FAKE_TORCH = """
class default_generator:
    @staticmethod
    def seed(): pass
def set_num_threads(count): pass
"""


def write_fake_torch(folder: Path) -> Path:
    """Write an empty torch, and return the folder to import it from."""
    fake_torch = folder / "fake" / "torch"
    (fake_torch / "distributed").mkdir(parents=True)
    (fake_torch / "__init__.py").write_text(FAKE_TORCH)
    (fake_torch / "distributed" / "__init__.py").write_text("")
    return fake_torch.parent
