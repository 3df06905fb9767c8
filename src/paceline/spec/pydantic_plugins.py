"""Pydantic without plugins: to find them, it reads the metadata of every installed package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NAME = "PYDANTIC_DISABLE_PLUGINS"


@contextmanager
def plugins_disabled() -> Iterator[None]:
    """Keep pydantic from looking for plugins. Afterwards, processes that this one starts may use
    them as always.
    """
    before = os.environ.get(NAME)
    os.environ[NAME] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NAME]
        else:
            os.environ[NAME] = before
