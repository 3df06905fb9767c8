"""Words for the shell of another machine."""

from paceline.ssh.connection import word

__all__ = ["word"]
