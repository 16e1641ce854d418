"""An endpoint of etcd that loses answers, and passes questions on when they have long been given up."""

from __future__ import annotations

import http.client
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fate = Literal["pass", "lose the question", "lose the answer", "hold"]


class Lossy:
    """In front of a server. Questions meet the fates that were set for them, in turn, and then pass."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.fates: deque[Fate] = deque()
        self._held: list[tuple[str, bytes, str]] = []
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Lossy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def release(self) -> list[bytes]:
        """What was held reaches the server now; what it answers to nobody."""
        held, self._held = self._held, []
        return [self._forward(*question)[1] for question in held]

    def _forward(self, path: str, body: bytes, token: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._endpoint, timeout=10)
        try:
            connection.request("POST", path, body, {"Authorization": token} if token else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _handler(lossy) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 0.2  # a connection that is kept for nothing must not hold the end up

            def do_POST(self) -> None:
                question = self.path, self.rfile.read(int(self.headers["Content-Length"]))
                fate = lossy.fates.popleft() if lossy.fates else "pass"
                self.close_connection = fate != "pass"
                if fate == "hold":
                    lossy._held.append((*question, ""))
                    lossy._closing.wait(2)  # say nothing: the other side gives up first
                elif fate != "lose the question":
                    status, answer = lossy._forward(*question)
                    if fate == "pass":
                        self.send_response(status)
                        self.send_header("Content-Length", str(len(answer)))
                        self.end_headers()
                        self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        return Handler
