"""Errors of the gateway itself, in the shapes OpenAI's and Anthropic's clients know."""

from __future__ import annotations

import msgspec


class GatewayError(Exception):
    """A request the gateway answers itself, with ``status`` and a one-line ``message``."""

    def __init__(
        self, status: int, kind: str, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.headers = headers

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        return _anthropic_body(self.status, self.message)


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types of errors by status, where they are not simply the client's or the server's fault."""


class _Said(msgspec.Struct):
    message: str


class _EngineError(msgspec.Struct):
    error: _Said


_ENGINE_ERROR = msgspec.json.Decoder(_EngineError)


def as_anthropic(status: int, text: bytes) -> bytes:
    """An engine's JSON error, OpenAI's shape or nearly Anthropic's, in Anthropic's; anything else as it is."""
    try:
        return _anthropic_body(status, _ENGINE_ERROR.decode(text).error.message)
    except (ValueError, RecursionError):
        return text


def _anthropic_body(status: int, message: str) -> bytes:
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def too_large(limit_mb: int) -> GatewayError:
    message = f"request body is larger than {limit_mb} MB (gateway.max_body_mb)"
    return GatewayError(413, "invalid_request_error", message)


def too_busy(limit: int) -> GatewayError:
    message = f"{limit} requests are in flight already (gateway.max_in_flight); try again"
    return GatewayError(503, "overloaded_error", message, ((b"retry-after", b"1"),))


def unauthorized(message: str) -> GatewayError:
    headers = ((b"www-authenticate", b"Bearer"),)
    return GatewayError(401, "authentication_error", message, headers)


def not_an_object() -> GatewayError:
    return GatewayError(400, "invalid_request_error", "the body is not a JSON object (in UTF-8)")


def bad_salt() -> GatewayError:
    return GatewayError(400, "invalid_request_error", "cache_salt is not a non-empty string")


def unreachable(url: str) -> GatewayError:
    return GatewayError(502, "api_connection_error", f"the engine at {url} cannot be reached")


def broken_off(url: str) -> GatewayError:
    return GatewayError(502, "api_connection_error", f"the engine at {url} broke off its reply")


def timed_out(url: str, seconds: float) -> GatewayError:
    message = f"the engine at {url} was silent for {seconds:g} s (gateway.read_timeout_s)"
    return GatewayError(504, "timeout_error", message)


def not_found(path: str) -> GatewayError:
    return GatewayError(404, "not_found_error", f"no such path: {path}; the API is under /v1")
