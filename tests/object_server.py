"""A server of objects on this machine, which speaks as much of S3 as readers need, and fails on request."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs


class ServedRequest(NamedTuple):
    """A request: the method, the object's name, and the first byte and the byte after the last."""

    method: str
    name: str
    begin: int
    end: int


class ObjectServer(ThreadingHTTPServer):
    """Objects by "bucket/key".

    Attributes:
        requests: those that were answered, in order.
        flips: number of next GETs of ranges whose first byte is wrong.
        refusals: number of next GETs that are refused with 503.
        cuts: number of next GETs that end in the middle.
        delay: seconds before each answer.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[ServedRequest] = []
        self.flips = self.refusals = self.cuts = 0
        self.delay = 0.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def takes(self, fault: str) -> bool:
        """Return whether this request has the fault, which then is used up."""
        with self.lock:
            left = getattr(self, fault)
            setattr(self, fault, max(0, left - 1))
            return bool(left > 0)


class _Handler(BaseHTTPRequestHandler):
    server: ObjectServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        time.sleep(self.server.delay)
        name = self.path.partition("?")[0].lstrip("/")
        query = parse_qs(self.path.partition("?")[2])
        if "list-type" in query:
            return self._list(name, query.get("prefix", [""])[0])
        data = self.server.objects.get(name)
        if data is None:
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", with_body)
        tag = f'"{zlib.crc32(data[:1000000]):08x}-{len(data)}"'
        if self.headers.get("If-Match", tag) != tag:
            return self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>", with_body)
        if with_body and self.server.takes("refusals"):
            return self._send(503, b"<Error><Code>SlowDown</Code></Error>", with_body)
        begin, end, status = 0, len(data), 200
        if requested := self.headers.get("Range"):
            first, _, last = requested.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, len(data)), 206
        with self.server.lock:
            self.server.requests.append(ServedRequest(self.command, name, begin, end))
        body = data[begin:end]
        if status == 206 and self.server.takes("flips"):
            body = bytes([body[0] ^ 1]) + body[1:]
        extra = {"ETag": tag, "Last-Modified": "Wed, 01 Jul 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if status == 206:
            extra["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._send(status, body, with_body, extra)

    def _list(self, bucket: str, prefix: str) -> None:
        names = (
            name.partition("/")[2] for name in sorted(self.server.objects) if name.startswith(f"{bucket}/")
        )
        entries = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-07-01T00:00:00.000Z</LastModified><Size>1</Size>"
            "</Contents>"
            for name in names
            if name.startswith(prefix)
        )
        self._send(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode(), with_body=True)

    def _send(self, status: int, body: bytes, with_body: bool, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in (extra or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            if self.server.takes("cuts"):
                body = body[: len(body) // 2]
                self.close_connection = True
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Serve in a thread until the block ends."""
    server = ObjectServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
