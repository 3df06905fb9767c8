"""`paceline` and `python -m paceline`."""

from __future__ import annotations

import sys

NOT_ON_WINDOWS = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")  # modules of Python


def main() -> None:
    try:
        _main()
    except ModuleNotFoundError as problem:
        if problem.name not in NOT_ON_WINDOWS:
            raise
        sys.exit(
            "paceline: error: This command does not work on Windows.\n"
            "  Use it in WSL 2. On Windows itself, start your script with `python`: "
            "`paceline.spawn` starts its ranks."
        )
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

    # Collecting often while a command imports costs a tenth of that time. Some commands last for
    # days, so do collect.
    gc.set_threshold(50_000)

    from paceline.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
