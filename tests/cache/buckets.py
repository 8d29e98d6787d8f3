"""A server of S3's protocol in this process, as far as `s3://` needs it: objects are put, looked at, read in ranges and
listed. It can fail, refuse and hang."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

HANG_SECONDS = 30.0


class Bucket:
    """objects  what lies there, by "bucket/name"
    status   what every request is answered with, instead of what is asked; None: as it should be
    let_go   set where requests are answered; cleared where they hang"""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status: int | None = None
        self.requests = 0
        self.let_go = threading.Event()
        self.let_go.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self) -> None:
        name, query = self._asked()
        if "list-type" in query:
            prefix = f"{name.strip('/')}/{query.get('prefix', [''])[0]}"
            found = [n for n in self.bucket.objects if n.startswith(prefix)]
            rows = "".join(f"<Contents><Key>{n.partition('/')[2]}</Key><Size>1</Size></Contents>" for n in found)
            self._answer(200, f"<ListBucketResult><KeyCount>{len(found)}</KeyCount>{rows}</ListBucketResult>".encode())
        elif name not in self.bucket.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>not there</Message></Error>")
        else:
            data, wanted = self.bucket.objects[name], self.headers.get("Range")
            if wanted is None:
                self._answer(200, data)
                return
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()  # type: ignore[union-attr]
            part = data[int(first) : int(last or len(data)) + 1]
            self._answer(206, part, {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        name, _ = self._asked()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            data = _unchunked(data)
        self.bucket.objects[name] = data
        self._answer(200, b"", {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        self.bucket.requests += 1
        path = urlsplit(self.path)
        return unquote(path.path)[1:], parse_qs(path.query)

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.bucket.let_go.wait(HANG_SECONDS)
        if self.bucket.status is not None:
            status, data, headers = self.bucket.status, b"<Error><Code>AccessDenied</Code></Error>", {}
        self.send_response(status)
        for name, value in {"ETag": '"0"', **(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _unchunked(data: bytes) -> bytes:
    """What newer clients send in signed chunks: size in hex, content, until one of nothing."""
    whole = b""
    while data:
        head, _, data = data.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        whole, data = whole + data[:size], data[size + 2 :]
    return whole


@contextmanager
def serving() -> Iterator[tuple[Bucket, str]]:
    """(what lies there, the server's address) until the end of the block."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield bucket, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        bucket.let_go.set()
        server.shutdown()
        server.server_close()
