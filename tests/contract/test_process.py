"""What a process inherits."""

from __future__ import annotations

import os

from paceline.contract.process import is_open


def test_a_closed_descriptor_is_not_open() -> None:
    reader, writer = os.pipe()
    assert is_open(reader)
    os.close(reader)
    assert not is_open(reader)
    assert is_open(writer)
    os.close(writer)
