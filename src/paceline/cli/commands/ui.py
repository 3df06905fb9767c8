"""`paceline ui`: view your runs in a browser."""

from __future__ import annotations

import getpass
import importlib.util
import os
import socket
import sys
from contextlib import suppress
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.errors import EnvironmentProblem

NEEDED = ("starlette", "uvicorn", "plotly")


def command(
    *,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="Listen on this port; default: a free one.",
            show_default=False,
        ),
    ] = 0,
    tunnel: Annotated[
        bool, typer.Option("--tunnel", help="Print the ssh command for your own machine.")
    ] = False,
    allow_actions: Annotated[
        bool,
        typer.Option("--allow-actions", help="Let the page cancel, stop and requeue your runs."),
    ] = False,
) -> int:
    """Serve a dashboard of your runs on this machine, and print its link.

    Only people with the link can open it. End it with Ctrl-C; your runs keep running.

    \b
      paceline ui
      paceline ui --tunnel      on a login node: also print the ssh command
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            f"`paceline ui` needs {' and '.join(missing)}, which this Python does not have.",
            hint=f"Install it: {sys.executable} -m pip install 'paceline[ui]'",
        )
    from paceline.ui.web.access import Access
    from paceline.ui.web.app import Answers, listen, make_app, make_server

    answers, access = Answers(runs.scratch_here(), allow_actions=allow_actions), Access()
    server = make_server(make_app(answers, access))
    with listen(port) as listener, suppress(KeyboardInterrupt):
        chosen = listener.getsockname()[1]
        link = access.link(chosen)
        print(f"Open this link in your browser:\n\n  {link}\n")
        if tunnel or os.environ.get("SSH_CONNECTION"):
            there = f"{getpass.getuser()}@{socket.getfqdn()}"
            print("If your browser is on another machine, run this there first:\n")
            print(f"  ssh -N -L {chosen}:127.0.0.1:{chosen} {there}\n")
        text = "Anyone with the link can see your runs, so keep it private. Press Ctrl-C to stop."
        print(text, flush=True)
        server.run(sockets=[listener])
    console.say_note("stopped; your runs keep running")
    return 0
