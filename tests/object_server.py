"""A server of objects on this machine, which speaks as much of S3 and Google's XML API as megalite needs.

It fails on request.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

import pytest

_PAGE = 100
"""Objects of a page of a listing."""


class ServedRequest(NamedTuple):
    """A request: the method, the object's name, and the first byte and the byte after the last."""

    method: str
    name: str
    begin: int
    end: int


class ObjectServer(ThreadingHTTPServer):
    """Objects by "bucket/key".

    Attributes:
        requests: those that read an object and were answered, in order.
        writes: methods and names of the requests that change objects, in the order in which they arrived.
        flips: number of next GETs of ranges whose first byte is wrong.
        flips_in: a part of the names of the objects that have them.
        refusals: number of next GETs that are refused with 503.
        cuts: number of next GETs that end in the middle.
        delay: seconds before each answer.
        write_delay: seconds before each answer to a request that changes objects of 1,000 bytes or more.
        ignores_conditions: whether writes happen whatever is there, as in some stores.
        is_read_only: whether writes are forbidden.
        refusal: code of the error with which all requests are refused; empty for none.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, int] = {}  # time of each write, in seconds of a clock that counts writes
        self.parts: dict[str, dict[int, bytes]] = {}  # of multipart uploads, by id and number
        self.uploads: dict[str, str] = {}  # objects of all multipart uploads, also ended ones, by id
        self.requests: list[ServedRequest] = []
        self.writes: list[tuple[str, str]] = []
        self.flips_in = self.refusal = ""
        self.flips = self.refusals = self.cuts = 0
        self.delay = self.write_delay = 0.0
        self.ignores_conditions = self.is_read_only = False
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print an error, unless the client closed the connection: another test may have captured stderr."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

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
    disable_nagle_algorithm = True  # it would delay bodies, which follow their headers, by 40 ms

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_PUT(self) -> None:
        name, query, body = self._begin_write()
        if body is None:
            return
        if "partNumber" in query:
            self.server.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return self._send(200, b"", True, {"ETag": _tag(body)})
        with self.server.lock:
            old = self.server.objects.get(name)
            generation = str(self.server.written.get(name, 0) if old is not None else 0)
            refused = not self.server.ignores_conditions and (
                (self.headers.get("If-None-Match") == "*" and old is not None)
                or (self.headers.get("If-Match") not in (None, None if old is None else _tag(old)))
                or self.headers.get("x-goog-if-generation-match", generation) != generation
            )
            if not refused:
                self._store(name, body)
        if refused:
            return self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>", True)
        self._send(200, b"", True, {"ETag": _tag(body), "x-goog-generation": str(self.server.written[name])})

    def do_POST(self) -> None:
        name, query, body = self._begin_write()
        if body is None:
            return
        if "delete" in query:
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            with self.server.lock:
                for key in keys:
                    self.server.objects.pop(f"{name.rstrip('/')}/{key}", None)
            found = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return self._send_xml("DeleteResult", found)
        if "uploads" in query:
            upload = f"upload-{len(self.server.uploads)}"
            self.server.parts[upload], self.server.uploads[upload] = {}, name
            return self._send_xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        parts = self.server.parts.pop(query["uploadId"][0])
        whole = b"".join(parts[number] for number in sorted(parts))
        with self.server.lock:
            self._store(name, whole)
        self._send_xml("CompleteMultipartUploadResult", f"<ETag>{escape(_tag(whole))}</ETag>")

    def do_DELETE(self) -> None:
        name, query, body = self._begin_write()
        if body is None:
            return
        with self.server.lock:
            self.server.parts.pop(query.get("uploadId", [""])[0], None)
            if "uploadId" not in query:
                self.server.objects.pop(name, None)
        self._send(204, b"", True)

    def _begin_write(self) -> tuple[str, dict[str, list[str]], bytes | None]:
        """Return name, query and body of a request; no body if it has been answered."""
        path, _, query = self.path.partition("?")
        name = unquote(path).lstrip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        with self.server.lock:
            self.server.writes.append((self.command, name))
        time.sleep(self.server.delay + (self.server.write_delay if len(body) >= 1000 else 0.0))
        if code := self.server.refusal or ("AccessDenied" if self.server.is_read_only else ""):
            self._refuse(code, with_body=True)
            return name, {}, None
        return name, parse_qs(query, keep_blank_values=True), body

    def _store(self, name: str, body: bytes) -> None:
        self.server.objects[name] = body
        self.server.written[name] = len(self.server.writes)

    def _answer(self, with_body: bool) -> None:
        time.sleep(self.server.delay)
        name = unquote(self.path.partition("?")[0]).lstrip("/")
        query = parse_qs(self.path.partition("?")[2])
        if self.server.refusal:
            return self._refuse(self.server.refusal, with_body)
        if "list-type" in query:
            return self._list(name, {key: values[0] for key, values in query.items()})
        if "uploads" in parse_qs(self.path.partition("?")[2], keep_blank_values=True):
            return self._list_uploads(name, query["prefix"][0])
        data = self.server.objects.get(name)
        if data is None:
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", with_body)
        tag = _tag(data)
        if self.headers.get("If-Match", tag) != tag:
            return self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>", with_body)
        if with_body and self.server.takes("refusals"):
            return self._send(503, b"<Error><Code>SlowDown</Code></Error>", with_body)
        begin, end, status = 0, len(data), 200
        if requested := self.headers.get("Range"):
            first, _, last = requested.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last or len(data)) + 1, len(data)), 206
        with self.server.lock:
            self.server.requests.append(ServedRequest(self.command, name, begin, end))
        body = data[begin:end]
        if status == 206 and self.server.flips_in in name and self.server.takes("flips"):
            body = bytes([body[0] ^ 1]) + body[1:]
        date = formatdate(1_780_000_000 + self.server.written.get(name, 0), usegmt=True)
        extra = {"ETag": tag, "Last-Modified": date, "Accept-Ranges": "bytes"}
        extra["x-goog-generation"] = str(self.server.written.get(name, 0))
        if status == 206:
            extra["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._send(status, body, with_body, extra)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        start = f"{bucket.rstrip('/')}/"
        with self.server.lock:
            objects = {
                name[len(start) :]: data
                for name, data in self.server.objects.items()
                if name.startswith(start)
            }
        keys = sorted(key for key in objects if key.startswith(prefix))
        if "delimiter" in query:
            folders = {
                key[: end + 1] for key in keys if (end := key.find(query["delimiter"], len(prefix))) >= 0
            }
            keys = sorted({*folders, *(key for key in keys if query["delimiter"] not in key[len(prefix) :])})
        left = [key for key in keys if key > after]
        page = left[:_PAGE]
        text = "".join(
            f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
            if key not in objects
            else f"<Contents><Key>{escape(key)}</Key><LastModified>2026-07-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_tag(objects[key]))}</ETag><Size>{len(objects[key])}</Size></Contents>"
            for key in page
        )
        if len(left) > len(page):
            text += "<IsTruncated>true</IsTruncated>"
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        self._send_xml("ListBucketResult", text)

    def _list_uploads(self, bucket: str, prefix: str) -> None:
        """Show one upload at a time."""
        start, names = f"{bucket}/{prefix}", self.server.uploads
        found = [each for each in self.server.parts if names[each].startswith(start)]
        text = f"<IsTruncated>{str(len(found) > 1).lower()}</IsTruncated>"
        for each in found[:1]:
            key = escape(names[each].partition("/")[2])
            text += f"<Upload><Key>{key}</Key><UploadId>{escape(each)}</UploadId></Upload>"
        self._send_xml("ListMultipartUploadsResult", text)

    def _refuse(self, code: str, with_body: bool) -> None:
        text = f"<Error><Code>{code}</Code><Message>It says why.</Message></Error>" if with_body else ""
        self._send(404 if code.startswith("NoSuch") else 403, text.encode(), with_body)

    def _send_xml(self, name: str, content: str) -> None:
        self._send(200, f"<{name}>{content}</{name}>".encode(), with_body=True)

    def _send(self, status: int, body: bytes, with_body: bool, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in (extra or {}).items():
            self.send_header(header, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            if body and self.command == "GET" and self.server.takes("cuts"):
                body = body[: len(body) // 2]
                self.close_connection = True
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@lru_cache(maxsize=256)  # an object has as many requests as parts that are read of it
def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


_ACCOUNT_FIELDS = ("client_email", "private_key", "private_key_id")


def settings_for(server_url: str) -> dict[str, str]:
    """Return the environment in which s3:// and gs:// are a server."""
    account = {"gcs_base_url": server_url, "disable_oauth": True}
    return {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account | dict.fromkeys(_ACCOUNT_FIELDS, "")),
        "GOOGLE_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "r",
        "AWS_ENDPOINT_URL": server_url,
    }


@contextmanager
def s3_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Serve s3:// and gs:// in this process until the block ends; temporary files are in `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    with object_server() as server:
        for name, value in settings_for(server.url).items():
            monkeypatch.setenv(name, value)
        yield server


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Serve in a thread until the block ends."""
    server = ObjectServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
