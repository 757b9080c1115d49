"""Who may use the control API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping


def has_token(headers: Mapping[str, str], token: str) -> bool:
    """Whether ``Authorization: Bearer`` carries the token; without a token everybody may."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    right = secrets.compare_digest(given.strip().encode(), token.encode())
    return not token or (scheme.lower() == "bearer" and right)
