"""`paceline` and `python -m paceline`."""

from __future__ import annotations


def main() -> None:
    from paceline.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
