"""The control API: what sessions there are, what is done with their KV, and the levers to do something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvpilot import __version__
from kvpilot.backends.base import BackendError
from kvpilot.context.chunks import HASH_BYTES, parse_hash
from kvpilot.control.access import has_token
from kvpilot.control.seed import Seed
from kvpilot.coordinator.explain import Explainer
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.coordinator.view import Reader
from kvpilot.domain import (
    ActionKind,
    ActionRecord,
    Command,
    Retention,
    SessionRef,
    Signal,
    SignalKind,
    TargetKind,
)
from kvpilot.hints.ids import parse_id
from kvpilot.sessions.book import Session

PREFIX = "/kvpilot/v1"
MAX_WAIT_S = 120.0
MAX_ETA_S = 30 * 86400.0
MAX_CHUNKS = 10_000
MAX_SESSIONS = 1000
"""Sessions in one reply: more would hold up the event loop."""


def _id(value: str) -> str:
    """The rule of the gateway for what names a session (or a tenant, or an action)."""
    dropped: list[str] = []
    parsed = parse_id(value, "", dropped)
    if parsed is None:
        raise ValueError(dropped[0].removeprefix(": "))
    return parsed


def _chunk_name(text: str) -> str:
    parse_hash(text)
    return text


Id = Annotated[str, AfterValidator(_id)]
ChunkName = Annotated[str, AfterValidator(_chunk_name)]
ChunkHash = Annotated[str, StringConstraints(pattern=f"^[0-9A-Fa-f]{{{2 * HASH_BYTES}}}$")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the final outcome.")]
Tenant = Annotated[Id | None, Query(description="Needed only where two tenants use the same session id.")]


class Body(BaseModel):
    """A request's JSON object, all of it text that can be written down again and numbers that are finite."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        # Python's parser lets NaN, Infinity and lone surrogates pass, which are neither JSON nor Unicode.
        if not isinstance(value, dict):
            return value
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise ValueError("lone surrogates, NaN, Infinity and endless nesting are not accepted") from None
        return value


class SignalBody(Body):
    """A life-cycle hint about a session."""

    kind: SignalKind
    parent: Id | None = None
    eta_s: float | None = Field(
        default=None, ge=0, le=MAX_ETA_S, description="Expected seconds until the next request."
    )
    ttl_s: float | None = Field(default=None, ge=0, le=86_400, description="With retain: seconds to keep it.")
    priority: int = Field(default=0, ge=-100, le=100, description="With retain: higher is kept longer.")


class ActionBody(Body):
    """What to do, and with what: a session, a range of its messages or tools, or chunk hashes."""

    kind: ActionKind
    id: Id | None = Field(
        default=None,
        description="Your own id: sent again under it, the action is shown again, not done again.",
    )
    session: Id | None = None
    tenant: Id | None = None
    target: TargetKind | None = None
    start: int = Field(default=0, ge=0)
    end: int = Field(default=0, ge=0)
    messages: list[dict[str, Any]] | None = Field(
        default=None, description="The old messages a range counts in."
    )
    tools: list[dict[str, Any]] | None = None
    chunks: list[ChunkName] = Field(
        default_factory=list, max_length=MAX_CHUNKS, description="Chunk hashes in hex."
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> ActionBody:
        if self.end < self.start:
            raise ValueError(f"the range ends before it starts: give an end of at least {self.start}")
        if self.end and self.target in (None, TargetKind.SESSION, TargetKind.CHUNKS):
            raise ValueError("start and end need a target they count in: messages, tools, tokens or blocks")
        return self


class LocateBody(Body):
    """Chunks to look for."""

    chunks: list[ChunkHash] = Field(max_length=MAX_CHUNKS, description="Chunk hashes, 64 hex digits each.")
    salt: str = Field(default="", description="cache_salt of the requests that made them.")


class ModeBody(Body):
    mode: str = Field(pattern="^(kvpilot|passive)$")


def as_json(record: ActionRecord) -> dict[str, Any]:
    out: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
    out["kind"], out["status"] = record.kind.value, record.status.value
    return out


def _in_one_line(error: RequestValidationError) -> str:
    """The first fault: where it is and what is wrong. What was sent is not repeated, it may be unprintable."""
    first, *others = error.errors()
    _, *place = first["loc"]
    where = "" if place and isinstance(place[0], str) else "body"
    where += "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    more = f" (and {len(others)} more)" if others else ""
    where = ascii(where.removeprefix("."))[1:-1][:80]
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{more}"


def create_app(
    service: CoordinatorService,
    planner: Planner,
    reader: Reader,
    metrics: Callable[[], bytes],
    token: str = "",
    seed: Seed | None = None,
) -> FastAPI:
    """The ASGI application. With a ``token`` every route but health and the API's own description needs
    ``Authorization: Bearer``; ``seed``, which is served beside it, has rules of its own."""

    def authorised(request: Request) -> None:
        if not has_token(request.headers, token):
            raise HTTPException(401, "send Authorization: Bearer with the coordinator's token")

    app = FastAPI(
        title="kvpilot control API",
        version=__version__,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=f"{PREFIX}/docs",
        redoc_url=None,
    )
    guard = [Depends(authorised)]

    def find(session_id: str, tenant: str | None) -> Session:
        found = [s for s in service.book.find(session_id) if tenant is None or s.tenant == tenant]
        if not found:
            raise HTTPException(404, f"session {session_id!r} is not known")
        if len(found) > 1:
            tenants = ", ".join(sorted(s.tenant for s in found))
            raise HTTPException(
                409, f"session {session_id!r} exists for several tenants ({tenants}): give ?tenant="
            )
        return found[0]

    explainer = Explainer(service, planner)

    def signal(session: Session, body: SignalBody) -> list[ActionRecord]:
        if body.kind is SignalKind.RETAIN and body.ttl_s is None:
            raise HTTPException(422, "retain needs ttl_s")
        retention = None if body.ttl_s is None else Retention(ttl_s=body.ttl_s, priority=body.priority)
        return service.handle(
            Signal(
                at=service.clock(),
                tenant=session.tenant,
                session=SessionRef(session.id, body.parent, "api"),
                kind=body.kind,
                eta_s=body.eta_s,
                retention=retention,
            )
        )

    @app.get(f"{PREFIX}/health")
    async def health() -> dict[str, Any]:
        """Alive, and in which mode."""
        return {
            "status": "ok",
            "mode": service.mode,
            "version": __version__,
            "directory_stale": service.residency.stale(service.clock()),
            "engine_plugin": service.device.active,
        }

    @app.get(f"{PREFIX}/sessions", dependencies=guard)
    async def sessions(
        limit: Annotated[int, Query(ge=1, le=MAX_SESSIONS)] = 200, offset: Annotated[int, Query(ge=0)] = 0
    ) -> dict[str, Any]:
        """A page of the known sessions, latest first; ``total`` says how many there are."""
        known = sorted(service.book.sessions.values(), key=lambda s: -s.last_seen)
        shown = known[offset : offset + limit]
        return {"sessions": [reader.summary(s) for s in shown], "total": len(known)}

    @app.get(f"{PREFIX}/sessions/{{session_id:path}}", dependencies=guard)
    async def session(session_id: Id, tenant: Tenant = None) -> dict[str, Any]:
        """One session: segments, where each chunk is, what will happen next."""
        return reader.detail(find(session_id, tenant), planner.decisions)

    @app.post(f"{PREFIX}/sessions/{{session_id:path}}/signals", status_code=202, dependencies=guard)
    async def signals(session_id: Id, body: SignalBody, tenant: Tenant = None) -> dict[str, Any]:
        """Tell what the session is doing; the ids of the actions this started are returned."""
        return {"actions": [r.id for r in signal(find(session_id, tenant), body)]}

    @app.delete(f"{PREFIX}/sessions/{{session_id:path}}", status_code=202, dependencies=guard)
    async def end(session_id: Id, tenant: Tenant = None) -> dict[str, Any]:
        """The session is over: what only it references is evicted."""
        return {"actions": [r.id for r in signal(find(session_id, tenant), SignalBody(kind=SignalKind.END))]}

    @app.post(f"{PREFIX}/actions", status_code=202, dependencies=guard)
    async def act(body: ActionBody, wait: Wait = 0.0) -> Any:
        """Prefetch, demote or evict; returns the action, or ``{"actions": […]}`` where it takes several."""
        if bool(body.session) == bool(body.chunks):
            raise HTTPException(422, "give either a session or chunks")
        tenant = body.tenant or "default"
        if body.session and body.tenant is None and service.book.get("default", body.session) is None:
            owner = find(body.session, None)
            tenant = owner.tenant
        request = {"messages": body.messages or [], "tools": body.tools or []}
        target = body.target or (TargetKind.CHUNKS if body.chunks else TargetKind.SESSION)
        records = await service.command(
            Command(
                kind=body.kind,
                tenant=tenant,
                salt="",
                session=SessionRef(body.session, None, "api"),
                target=target,
                start=body.start,
                end=body.end,
                body=msgspec.json.encode({k: v for k, v in request.items() if v}),
                chunks=tuple(body.chunks),
                client_ids=(f"action:{body.id}",) if body.id else (),
            )
        )
        if wait:
            records = [await service.actions.wait(r.id, wait) or r for r in records]
        shown = [as_json(r) for r in records]
        return shown[0] if len(shown) == 1 else {"actions": shown}

    @app.get(f"{PREFIX}/explain/sessions/{{session_id:path}}", dependencies=guard)
    async def explain_session(session_id: Id, tenant: Tenant = None) -> dict[str, Any]:
        """Why a session's KV is where it is: what it waits for, when it is expected, what its room is worth, what
        is going to be done and was done last."""
        return explainer.session(find(session_id, tenant))

    @app.get(f"{PREFIX}/explain/chunks/{{chunk}}", dependencies=guard)
    async def explain_chunk(chunk: ChunkHash) -> dict[str, Any]:
        """The same of a chunk, for all who hold it."""
        found = explainer.chunk(bytes.fromhex(chunk))
        if not found:
            raise HTTPException(404, f"chunk {chunk} is in no live context and in no tier that kvpilot sees")
        return {"spaces": found}

    @app.get(f"{PREFIX}/actions", dependencies=guard)
    async def actions(
        session: Id | None = None,
        tenant: Tenant = None,
        limit: Annotated[int, Query(ge=1, le=5000)] = 100,
    ) -> dict[str, Any]:
        """The action log, newest first."""
        out = []
        for record in service.actions.newest(session=session, tenant=tenant):
            out.append(as_json(record))
            if len(out) == limit:
                break
        return {"actions": out}

    @app.get(f"{PREFIX}/actions/{{action_id}}", dependencies=guard)
    async def action(action_id: Id, wait: Wait = 0.0) -> dict[str, Any]:
        """One action and what became of it."""
        record = await service.actions.wait(action_id, wait)
        if record is None:
            raise HTTPException(404, f"action {action_id!r} is not known")
        return as_json(record)

    @app.post(f"{PREFIX}/chunks/locate", dependencies=guard)
    async def locate(body: LocateBody) -> dict[str, Any]:
        """Where chunks are, asked now from the cache layer's directory (which lags about a second)."""
        chunks = [bytes.fromhex(text) for text in body.chunks]
        try:
            found = await service.backend.locate(service.space_of(body.salt), chunks)
        except BackendError as error:
            raise HTTPException(503, f"the cache layer does not answer: {error}") from None
        return {"tiers": [sorted(tiers) for tiers in found]}

    @app.put(f"{PREFIX}/mode", dependencies=guard)
    async def mode(body: ModeBody) -> dict[str, str]:
        """``kvpilot`` acts; ``passive`` only observes."""
        service.mode = body.mode
        return {"mode": service.mode}

    @app.get(f"{PREFIX}/tiers", dependencies=guard)
    async def tiers() -> dict[str, Any]:
        """Bytes held and capacity per tier, as the cache layer says."""
        usage = [{"tier": u.tier.value, "used_bytes": u.used_bytes, "capacity_bytes": u.capacity_bytes}
                 for u in service.residency.usage]  # fmt: skip
        return {"tiers": usage, "as_of": service.residency.usage_at}

    @app.get("/metrics", dependencies=guard, include_in_schema=False)
    async def prometheus() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    if seed is not None:
        app.include_router(seed.router)

    @app.exception_handler(RequestValidationError)
    async def refused(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": _in_one_line(error)}, status_code=422)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"internal error: {type(error).__name__}"}, status_code=500)

    return app
