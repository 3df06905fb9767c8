"""What Python's fault handler prints."""

from __future__ import annotations

from paceline.contract.stacks import read_crash

CRASH = """step 7
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/p/workers.py", line 3 in fetch

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/p/train.py", line 4 in step
  File "/p/train.py", line 9 in <module>

Thread 0x00007f03 (most recent call first):
  File "/p/other.py", line 5 in run

Extension modules: torch._C (total: 1)
"""


def test_the_line_of_the_script_that_crashed() -> None:
    assert read_crash(CRASH) == "train.py:4 in step"
    assert read_crash(CRASH.partition("Current thread")[0]) == ""
    assert read_crash('Current thread 0x1:\n  File "/p/train.py", line 4 in step\n') == ""
