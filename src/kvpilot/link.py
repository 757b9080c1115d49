"""The wire between gateway workers and the coordinator: where the sockets are and what frames look like.

Events: a Unix stream socket (workers connect, the coordinator listens); frames of four bytes of length (big-endian)
and a MessagePack ``domain.Event``, see ``event_wire``. They carry whole requests at the rate of the traffic: a message
queue in between would copy each of them twice more and wake a thread on either side.
Commands: ZMQ, DEALER (worker, connects) ↔ ROUTER (coordinator, binds); two frames, an 8-byte correlation id and a
MessagePack ``CommandBatch`` one way, the same id and a ``CommandReply`` the other way.
Sockets lie in a folder only this user can enter.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from kvpilot.config import Config
from kvpilot.domain import CommandBatch, CommandReply, Event, PromptKnown, RequestFinished, RequestStarted
from kvpilot.event_wire import LONG

event_encoder = msgspec.msgpack.Encoder()
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_LONG_FIELD = {RequestStarted: "body", PromptKnown: "prompt_ids", RequestFinished: "prompt_ids"}
"""The field of an event that may be most of it."""
_MAP, _MAP_OF_15 = 0x80, 0x8F
"""First bytes of MessagePack's short maps."""

batch_decoder = msgspec.msgpack.Decoder(CommandBatch)
reply_decoder = msgspec.msgpack.Decoder(CommandReply)


def event_frame(event: Event) -> tuple[bytes, bytes]:
    """An event in MessagePack, in two pieces: what is long in it is not copied, and may be empty."""
    name = _LONG_FIELD.get(type(event), "")
    value: bytes = getattr(event, name) if name else b""
    if len(value) < LONG:
        return event_encoder.encode(event), b""
    head = event_encoder.encode(msgspec.structs.replace(event, **{name: b""}))
    if not _MAP <= head[0] < _MAP_OF_15:
        return event_encoder.encode(event), b""
    # An empty field is left out: the map gets one more, whose value is the other piece.
    length = len(value).to_bytes(4, "big")
    return b"".join((bytes((head[0] + 1,)), head[1:], event_encoder.encode(name), b"\xc6", length)), value


def runtime_dir(config: Config) -> Path:
    """Folder of the sockets: short (ipc paths end at 107 bytes), private, one per state folder."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    digest = hashlib.sha256(str(config.state_dir).encode()).hexdigest()[:12]
    return base / f"kvpilot-{os.getuid()}-{digest}"


def make_runtime_dir(config: Config) -> Path:
    """:func:`runtime_dir`, made if it is not there. Raises PermissionError where somebody else made it."""
    folder = runtime_dir(config)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set XDG_RUNTIME_DIR")
    return folder


def event_socket(config: Config) -> Path:
    return runtime_dir(config) / "events"


def command_endpoint(config: Config) -> str:
    return f"ipc://{runtime_dir(config)}/commands"
