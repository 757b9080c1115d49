"""API key → tenant → cache salt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from urllib.parse import quote

DEFAULT_TENANT = "default"
MAX_SALT = 128
"""Longest cache_salt LMCache takes; it also forbids ``@ / \\`` and NUL."""


class UnknownKey(Exception):
    """An API key that is nobody's, or none where one is needed."""


class Tenants:
    """Who a request belongs to. Without keys everybody is the default tenant."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = dict(keys)

    @property
    def named(self) -> bool:
        return bool(self._keys)

    def identify(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request by its ``Authorization: Bearer``, or else by its ``x-api-key`` (Anthropic's);
        raises UnknownKey."""
        if not self._keys:
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        tenant = self._keys.get(key.strip())
        if tenant is None:
            raise UnknownKey("unknown or missing API key")
        return tenant


def tenant_salt(tenant: str, client_salt: str = "") -> str:
    """The salt of a named tenant's KV: never equal for two tenants, whatever their names and clients' salts.

    Percent-encoding keeps out the characters LMCache forbids and the separators used here.
    """
    salt = quote(tenant, safe="")
    if client_salt:
        salt = f"{salt}:{quote(client_salt, safe='')}"
    if len(salt) <= MAX_SALT:
        return salt
    digest = hashlib.sha256(salt.encode()).hexdigest()
    return f"{salt[: MAX_SALT - len(digest) - 1]}#{digest}"
