"""One HTTP request as the gateway sees it, before anything is known about its body."""

from __future__ import annotations

import random
from urllib.parse import unquote

from kvpilot.domain import new_id
from kvpilot.gateway.asgi import Scope
from kvpilot.gateway.headers import RawHeaders, as_mapping


class Call:
    """Method, path and headers of a request, and the id kvpilot knows it by."""

    __slots__ = ("headers", "id", "method", "path", "raw_headers", "target")

    def __init__(self, scope: Scope) -> None:
        self.id = new_id("r", random.getrandbits(64))
        self.method: str = scope["method"]
        # With a slash behind it the engine knows no path, and redirects to where clients cannot go.
        self.path: str = scope["path"].rstrip("/")
        self.raw_headers: RawHeaders = scope["headers"]
        self.headers = as_mapping(self.raw_headers)
        query: bytes = scope["query_string"]
        path = (scope.get("raw_path") or self.path.encode()).rstrip(b"/")
        self.target = (path + b"?" + query if query else path).decode("latin-1")
        """Path and query as the client wrote them, without a slash at the path's end."""

    @property
    def inside_api(self) -> bool:
        """Under /v1, and not by way of ``..``: nothing else of the engine is for clients."""
        path = self.path
        if "%" in path or "\\" in path:
            path = unquote(path).replace("\\", "/")
        segments = path.split("/")
        return segments[1:2] == ["v1"] and ".." not in segments

    @property
    def has_body(self) -> bool:
        return "content-length" in self.headers or "transfer-encoding" in self.headers
