"""`paceline` and `python -m paceline`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # while a module is imported; afterwards, the command line handles it
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the command line
        sys.exit(130)


def _main() -> None:
    if sys.argv[1:2] == ["run"]:
        # Importing torch takes longest, so it starts before this command's own imports.
        from paceline.agent.workers.zygote import prestart

        prestart.start(sys.argv)
    import gc

    gc.disable()  # a command is short, and collecting while it imports costs a tenth of that time

    from paceline.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
