"""The memory protocol of LMCache-Ascend: clients prefetch and evict chunks by the hashes replies told them.

Agents written for it work against LMCache through kvpilot. What the protocol leaves open is decided as everywhere
in kvpilot: what other live contexts hold survives, and "started" is never reported as "completed".
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from msgspec import Meta

from kvpilot.backends.base import BackendError
from kvpilot.context.chunks import parse_hash
from kvpilot.control.access import has_token
from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.commands import Missing
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import ActionKind, ActionRecord, Command, OutcomeStatus, SessionRef, TargetKind, Tier
from kvpilot.tenants import DEFAULT_TENANT, Tenants, UnknownKey, tenant_salt

SOURCE = "lmcache-ascend"
EVICT_WAIT_S = 10.0
"""How long an evict is waited for: as long as the protocol's own scheduler gives a worker."""
MAX_LOOKUPS = 10_000
LOOKUP_TTL_S = 3600.0
HOST, DISK = "LocalCPUBackend", "LocalDiskBackend"
POSSIBLE = (
    f"{HOST} (host memory, of what is on disk too), {HOST} with {DISK}, or no locations at all (every tier)"
)

Hashes = Annotated[list[str], Meta(min_length=1, max_length=10_000)]


class PrefetchBody(msgspec.Struct):
    chunk_hashes: Hashes
    lookup_id: Annotated[str, Meta(min_length=1, max_length=256)]


class EvictBody(msgspec.Struct):
    chunk_hashes: Hashes
    locations: list[str] | None = None


Body = TypeVar("Body", PrefetchBody, EvictBody)


class Refusal(Exception):
    """A request that is answered with ``status`` and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Route(APIRoute):
    """Errors in the protocol's shape, whichever application the route is part of."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Refusal as refusal:
                return JSONResponse({"error": str(refusal)}, refusal.status)

        return answer


@dataclass(slots=True)
class Lookup:
    """One prefetch; ``parts`` are its actions, each with the named chunks it is about, where any is known."""

    hashes: frozenset[bytes | int]
    at: float
    parts: list[tuple[ActionRecord, Work | None]] = field(default_factory=list)


class Seed:
    """``router`` serves the protocol. ``keys`` maps API keys to tenants; a key takes the place of ``token``, as
    one header cannot carry both."""

    def __init__(
        self, service: CoordinatorService, keys: Mapping[str, str] | None = None, token: str = ""
    ) -> None:
        self._service = service
        self._tenants = Tenants(keys or {})
        self._token = token
        self._lookups: OrderedDict[tuple[str, str], Lookup] = OrderedDict()
        self.router = APIRouter(prefix="/memory", route_class=_Route, tags=["LMCache-Ascend"])
        add = self.router.add_api_route
        add("/prefetch", self.prefetch, methods=["POST"], response_model=None)
        add("/prefetch/{lookup_id:path}", self.lookup, methods=["GET"], response_model=None)
        add("/evict", self.evict, methods=["POST"], response_model=None)

    def app(self) -> FastAPI:
        """The protocol alone, for a port of its own."""
        app = FastAPI(title="LMCache-Ascend memory protocol", openapi_url=None)
        app.include_router(self.router)
        return app

    # ------------------------------------------------------------ prefetch

    async def prefetch(self, request: Request) -> dict[str, Any]:
        """Start to bring the named chunks, and all before them, into host memory; rejected in passive mode."""
        tenant = self._tenant(request)
        body = _decode(await request.body(), PrefetchBody)
        hashes = _parsed(body.chunk_hashes)
        self._forget()
        key = (tenant, body.lookup_id)
        lookup = self._lookups.get(key)
        if lookup is None:
            # Known before anything is awaited: what is sent twice at once is not done twice either.
            lookup = self._lookups[key] = Lookup(hashes, self._service.clock())
            lookup.parts = await self._start_prefetch(tenant, body.chunk_hashes)
            if self._service.mode != "kvpilot":
                self._lookups.pop(key, None)  # nothing was started: the id is free for when it can be
                told = {"lookup_id": body.lookup_id, "num_chunks": len(hashes)}
                return {"status": "rejected", **told, "reason": lookup.parts[0][0].reason}
        elif lookup.hashes != hashes:
            raise Refusal(400, f"lookup_id {body.lookup_id!r} was used for other chunks: choose a new one")
        return {"status": "prefetch_started", "lookup_id": body.lookup_id, "num_chunks": len(hashes)}

    async def _start_prefetch(
        self, tenant: str, texts: Sequence[str]
    ) -> list[tuple[ActionRecord, Work | None]]:
        kind = ActionKind.PREFETCH
        try:
            works = await self._works(kind, tenant, texts)
        except Missing as missing:
            record = self._service.actions.open(
                kind,
                now=self._service.clock(),
                session=None,
                tenant=tenant,
                source=SOURCE,
                planned=0,
                status=OutcomeStatus.MISSING,
                reason=str(missing),
            )
            return [(record, None)]
        return [(self._service.begin_chunks(kind, work, tenant, SOURCE), work) for work in works]

    async def lookup(self, lookup_id: str, request: Request) -> dict[str, Any]:
        """What became of a prefetch; ``found`` of the named chunks are in host memory now."""
        tenant = self._tenant(request)
        self._forget()
        lookup = self._lookups.get((tenant, lookup_id))
        if lookup is None:
            raise Refusal(404, f"lookup_id {lookup_id[:256]!r} is not known (they are kept for an hour)")
        parts = [(self._service.actions.get(record.id) or record, work) for record, work in lookup.parts]
        pending = not parts or any(record.open for record, _ in parts)
        found = 0 if pending else await self._found(parts)
        if pending:
            status = "pending"
        elif found and not any(record.status in _UNDONE for record, _ in parts):
            status = "completed"
        else:
            status = "failed"
        return {
            "lookup_id": lookup_id,
            "status": status,
            "num_chunks": len(lookup.hashes),
            "found": found,
            "action_ids": [record.id for record, _ in parts],
        }

    async def _found(self, parts: Sequence[tuple[ActionRecord, Work | None]]) -> int:
        """How many of the named chunks the actions brought to host memory, or are there without them."""
        brought = 0
        unowned: set[bytes] = set()  # named in every space of the tenant, and to be counted once
        for record, work in parts:
            if work is None or record.status in _UNDONE:
                continue
            if record.status is OutcomeStatus.DONE:
                brought += len(work.chunks)
                continue
            tiers = await self._tiers(work)
            there = {chunk for chunk, held in zip(work.chunks, tiers, strict=True) if Tier.HOST in held}
            if work.owner is None:
                unowned |= there
            else:
                brought += max(len(there), _brought(record, len(work.chunks)))
        return brought + len(unowned)

    def _forget(self) -> None:
        oldest = self._service.clock() - LOOKUP_TTL_S
        while self._lookups:
            first = next(iter(self._lookups.values()))
            if first.at > oldest and len(self._lookups) <= MAX_LOOKUPS:
                break
            self._lookups.popitem(last=False)

    # ------------------------------------------------------------ evict

    async def evict(self, request: Request) -> Any:
        """Drop the named chunks; the answer tells how many are gone for certain."""
        tenant = self._tenant(request)
        body = _decode(await request.body(), EvictBody)
        _parsed(body.chunk_hashes)
        kind = _kind(body.locations)
        try:
            works = await self._works(kind, tenant, body.chunk_hashes)
        except Missing:
            works = []
        held = [sum(map(bool, await self._tiers(work))) for work in works]
        begun = [self._service.begin_chunks(kind, work, tenant, SOURCE) for work in works]
        waited = await asyncio.gather(*(self._service.actions.wait(r.id, EVICT_WAIT_S) for r in begun))
        records = [now or record for now, record in zip(waited, begun, strict=True)]
        # Of chunks that were nowhere, that they are gone is true but no doing of ours.
        count = sum(min(record.confirmed, there) for record, there in zip(records, held, strict=True))
        failed = [record for record in records if record.status is OutcomeStatus.FAILED]
        if failed:
            error = f"the cache layer failed: {failed[0].reason}"
            failures = {_port(r.reason): {"error": r.reason, "action_id": r.id} for r in failed}
            return JSONResponse({"error": error, "failures": failures, "num_evicted": count}, 500)
        if any(record.open for record in records):
            ids = [record.id for record in records]
            return JSONResponse({"status": "evict_started", "num_evicted": count, "action_ids": ids}, 202)
        if records and all(record.status is OutcomeStatus.REJECTED for record in records):
            return {"status": "rejected", "num_evicted": 0, "reason": records[0].reason}
        return {"status": "success", "num_evicted": count}

    # ------------------------------------------------------------ both

    async def _tiers(self, work: Work) -> list[frozenset[Tier]]:
        """Where each of the chunks is: by the directory, or newer, by what the layer itself reported."""
        seen = [self._service.residency.tiers(work.space, chunk) for chunk in work.chunks]
        try:
            listed = await self._service.backend.locate(work.space, work.chunks)
        except BackendError:
            return seen
        return [a | b for a, b in zip(seen, listed, strict=True)]

    async def _works(self, kind: ActionKind, tenant: str, texts: Sequence[str]) -> list[Work]:
        """The chunks by the context they belong to, in its order. Raises Missing."""
        salt = "" if tenant == DEFAULT_TENANT else tenant_salt(tenant)
        command = Command(
            kind,
            tenant,
            salt,
            SessionRef(source=SOURCE),
            TargetKind.CHUNKS,
            chunks=tuple(texts),
            source=SOURCE,
        )
        return (await self._service.resolver.resolve(command, self._service.space_of(salt))).works

    def _tenant(self, request: Request) -> str:
        if self._tenants.named:
            try:
                return self._tenants.identify(request.headers)
            except UnknownKey as error:
                raise Refusal(401, str(error)) from None
        if not has_token(request.headers, self._token):
            raise Refusal(401, "send Authorization: Bearer with the coordinator's token")
        return DEFAULT_TENANT


_UNDONE = (OutcomeStatus.FAILED, OutcomeStatus.REJECTED)


def _decode(raw: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not understood: {error}") from None


def _parsed(texts: Sequence[str]) -> frozenset[bytes | int]:
    try:
        return frozenset(map(parse_hash, texts))
    except ValueError as error:
        raise Refusal(400, f"chunk_hashes: {error}") from None


def _kind(locations: Sequence[str] | None) -> ActionKind:
    if locations is None or set(locations) == {HOST, DISK}:
        return ActionKind.EVICT
    if set(locations) == {HOST}:
        return ActionKind.DEMOTE
    asked = ", ".join(sorted(set(locations)))[:200] or "none"
    raise Refusal(400, f"locations ({asked}) cannot be emptied alone; possible are {POSSIBLE}")


def _brought(record: ActionRecord, named: int) -> int:
    """How many of an action's named chunks it brought to host memory by its own count, which is newer than the
    directory; at least."""
    if record.status is not OutcomeStatus.CLIPPED:
        return 0
    # It is about the named chunks and all before them: what it did not find may be any of these.
    return max(0, named - (record.planned + record.skipped - record.confirmed))


def _port(reason: str) -> str:
    """The port of the part that failed, by which the protocol names it."""
    named = re.search(r"://[^/\s]*:(\d+)", reason)
    return named[1] if named else "unknown"
