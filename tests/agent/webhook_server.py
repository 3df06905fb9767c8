"""A webhook: a real HTTP server on loopback that keeps what it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """Its address, with a secret path, and the notifications that have come."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.received: list[dict[str, Any]] = []
        self.status = 200

    def events(self) -> list[str]:
        return [each["event"] for each in self.received]


@contextmanager
def serve_webhook(secret: str = "hush-1234") -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == f"/services/{secret}":
                webhook.received.append(json.loads(body))
            self.send_response(webhook.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    webhook = Webhook(f"http://127.0.0.1:{server.server_port}/services/{secret}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield webhook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
