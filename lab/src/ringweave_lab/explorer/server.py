"""The command ``ringweave explore`` and the server of its page, which only this machine and this page can reach."""

from __future__ import annotations

import threading
import webbrowser
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import typer

from ringweave import __version__
from ringweave.cli import terminal
from ringweave.errors import PatternError, RingweaveError, UnsupportedError
from ringweave.patterns.declared import DECLARED
from ringweave.patterns.reader import parse

from .answer import Asked, answer, as_json

_HERE = "127.0.0.1"
# scripts and styles are inline, and the page loads nothing from elsewhere
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

#: Patterns that the page offers as starting points.
EXAMPLES: dict[str, dict[str, str]] = {
    "Causal window with sinks": {"pattern": "(SlidingWindow(1024) | Sinks(64)) & Causal()", "tokens": "16K"},
    "Longformer": {"pattern": "longformer(512, 16)", "tokens": "64K"},
    "Dilated window": {"pattern": "Dilated(64, 16) & Causal()", "tokens": "64K"},
    "LongNet": {"pattern": "LongNet([2048, 8192, 32768], [1, 4, 16])", "tokens": "256K"},
    "BigBird": {"pattern": "bigbird(8192, window=192, global_tokens=64, random=3)", "tokens": "8K"},
    "Sparse Transformer": {"pattern": "sparse_transformer_fixed(128, 32)", "tokens": "16K"},
    "An image's neighbourhood": {"pattern": "GridNeighborhood(Grid([64, 64]), 13)", "tokens": "4K"},
    "A video's windows": {"pattern": "GridWindows(Grid([8, 32, 32]), [4, 8, 8])", "tokens": "8K"},
    "Packed documents": {"pattern": "Documents([5000, 900, 7000, 3484]) & Causal()", "tokens": "16K"},
    "A pattern for each head": {"pattern": "PerHead([Causal(), SlidingWindow(256), Strided(64), Segments(1024)])",
                                "tokens": "4K"},
}  # fmt: skip


def _fits_any_length(example: str) -> bool:
    pattern = parse(example)
    try:
        for length in (1024, 16384):
            pattern.check(length, length, 0)
    except PatternError:
        return False
    return pattern.combinable and pattern.extents() == (None, None)


#: Patterns that the page can add to another: examples that fit any length.
PIECES = {
    name: known.example
    for name, known in sorted(DECLARED.items())
    if known.text and known.section is not None and _fits_any_length(known.example)
}


def start() -> dict[str, Any]:
    """Return the values that the page starts with."""
    return {
        "version": __version__, "defaults": asdict(Asked()), "examples": EXAMPLES, "pieces": PIECES,
        "names": sorted(name for name, known in DECLARED.items() if known.text),
    }  # fmt: skip


def page(recorded: dict[str, Any] | None = None) -> str:
    """Return the page: one HTML file with its script and style.

    Args:
        recorded: Answers by pattern and length. The page then shows only these and needs no server.
    """
    text = Path(__file__).with_name("page.html").read_text("utf-8")
    return text.replace("$START", as_json(start())).replace("$RECORDED", as_json(recorded))


class Server(ThreadingHTTPServer):
    """A server on 127.0.0.1 that computes one answer at a time."""

    daemon_threads = True
    # raise if another server already listens on the port
    allow_reuse_address = False

    def __init__(self, port: int = 0):
        super().__init__((_HERE, port), _Handler)
        self.computing = threading.Lock()

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{_HERE}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    """A handler of GET requests for the page and for ``answer?pattern=...``."""

    server: Server
    server_version, sys_version = "ringweave", ""
    timeout = 60

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._own():
            # a request of another site in the same browser, or of a host name that resolves to this machine
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "Only this machine can open this page.\n")
        elif url.path == "/":
            self._send(HTTPStatus.OK, "text/html", page())
        elif url.path == "/answer":
            status, body = self._answer(url.query)
            self._send(status, "application/json", body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not found.\n")

    def _own(self) -> bool:
        hosts = {f"{name}:{self.server.server_port}" for name in (_HERE, "localhost")}
        site = self.headers.get("Sec-Fetch-Site", "none")
        return self.headers.get("Host") in hosts and site in ("none", "same-origin")

    def _answer(self, query: str) -> tuple[HTTPStatus, str]:
        try:
            asked = Asked.of(dict(parse_qsl(query, keep_blank_values=True)))
            with self.server.computing:
                return HTTPStatus.OK, as_json(answer(asked))
        except RingweaveError as error:
            return HTTPStatus.BAD_REQUEST, as_json({"error": str(error)})

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; the page shows errors."""


def explore(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes any free port.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Compose a pattern on a local page that shows its picture, cost and distribution over ranks."""
    try:
        server = Server(port)
    except OSError as error:
        remedy = "Choose another with --port, or 0 for any free port."
        raise UnsupportedError("--port", port, "a free port", f"{error.strerror}. {remedy}") from None
    with server:
        terminal.out().print(f"{server.url}  (Ctrl+C ends it)", soft_wrap=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
