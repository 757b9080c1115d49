"""Records traffic as a trace: who called when, how long prompts and replies were, which tools ran; never what was said.

What :mod:`kvpilot.traces.recorded` describes is made here from requests as they end, beside them, and written by
:meth:`Recorder.run`. Ids are hashes under a key that is made at the start and never written, so that nobody can look
up whether a known text is in a recording.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvpilot.context.conversation import decode_body, head_length, reply_name, tool_facts
from kvpilot.context.messages import common_prefix
from kvpilot.coordinator.mapper import BYTES_PER_TOKEN, Pending
from kvpilot.domain import RequestFinished, Signal
from kvpilot.sessions.book import Session, SessionKey
from kvpilot.traces import ToolUse, TraceMessage
from kvpilot.traces.recorded import Line, RecordedCall, RecordedHead, RecordedSignal

log = logging.getLogger(__name__)

WRITE_S = 1.0
MAX_BUFFER = 16_000_000
"""Bytes that wait to be written; what does not fit because a disk stands still is left out, and counted."""
MAX_LENGTHS = 50_000
"""Messages whose length is remembered, so that the same text has the same length wherever it comes again."""
ENDING = ".jsonl"

_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class _Known:
    """A conversation as the file has it."""

    hashes: Sequence[bytes]
    head: str
    head_tok: int
    ends: list[int]
    """Tokens up to and with each message behind the head, the reply's included."""
    reply: bytes | None
    """What the reply is known by."""


class Recorder:
    """Writes files of at most about ``max_bytes`` into ``folder`` and keeps the latest ``files``.

    ``dropped``: lines that were not written, as a disk stood still or was full.
    """

    def __init__(self, folder: Path, chunk_tokens: int, max_bytes: int, files: int) -> None:
        self._folder, self._chunk_tokens = folder, chunk_tokens
        self._max_bytes, self._files = max_bytes, max(1, files)
        self._key = secrets.token_bytes(32)
        self._known: dict[str, _Known] = {}
        self._lengths: OrderedDict[str, int] = OrderedDict()
        self._waiting: list[tuple[Path, bytes]] = []
        self._buffered = 0
        self._written = 0
        self._began = 0
        self._path: Path | None = None
        self._working = True
        self.lines = 0
        self.dropped = 0

    # ------------------------------------------------------------ what happens

    def call(self, pending: Pending, event: RequestFinished) -> None:
        """A request ended. One that came to nothing, or that is no chat, is left out."""
        try:
            self._call(pending, event)
        except Exception:
            self._path = None  # what follows must be complete in itself
            log.exception("a request could not be recorded")

    def _call(self, pending: Pending, event: RequestFinished) -> None:
        body, started = pending.body, pending.started
        messages = body.get("messages")
        total = event.prompt_token_count if pending.prompt is None else len(pending.prompt)
        if not isinstance(messages, list) or event.status >= 400 or (event.aborted and not total):
            return
        self._begin_file_when_due()
        head = max(1, head_length(body))
        head_text = _encoder.encode([body.get("tools") or None, messages[: head - 1]])
        head_id = self._id(head_text)
        known = self._known.get(started.thread.owner)
        if known is None or known.head != head_id:
            keep, added = 0, messages[head - 1 :]
        else:
            keep = _kept(known, pending.hashes, messages, head)
            added = messages[head - 1 + keep :]
        texts = [_encoder.encode(message) for message in added]
        ids = [self._id(text) for text in texts]
        sizes = list(map(len, texts))
        if known is None or known.head != head_id:
            head_size = len(head_text) if head_length(body) else 0
            head_tok, *lengths = self._lengths_of([head_id, *ids], [head_size, *sizes], total)
            ends = []
        else:
            head_tok, ends = known.head_tok, known.ends[:keep]
            told = total - head_tok - (ends[-1] if ends else 0)
            lengths = self._lengths_of(ids, sizes, told)
        said = decode_body(event.message)
        reply_tok = event.completion_token_count or max(1, len(event.message) // BYTES_PER_TOKEN)
        for length in (*lengths, reply_tok):
            ends.append((ends[-1] if ends else 0) + length)
        self._known[started.thread.owner] = _Known(pending.hashes, head_id, head_tok, ends, reply_name(said))
        parent = started.session.parent
        self._put(
            RecordedCall(
                session=self._name(started.session.key),
                agent=self._id(started.thread.owner.encode()),
                at=round(pending.at, 4),
                first=None if event.first_token_at is None else round(event.first_token_at, 4),
                end=round(max(event.at, pending.at), 4),
                head=head_id,
                head_tok=head_tok,
                keep=keep,
                add=tuple(map(self._message, added, ids, lengths)),
                reply=self._message(
                    {**said, "role": "assistant"}, self._id(_encoder.encode(said)), reply_tok
                ),
                parent=None if parent is None else self._name(parent),
                cached_tok=event.cached_token_count,
            )
        )

    def signal(self, session: Session, event: Signal) -> None:
        """A hint about a session."""
        self._begin_file_when_due()
        self._put(RecordedSignal(session=self._name(session.key), at=round(event.at, 4), kind=event.kind))

    def forget(self, owner: str) -> None:
        """The conversation will not be heard of again."""
        self._known.pop(owner, None)

    # ------------------------------------------------------------ writing

    async def run(self) -> None:
        """Writes for ever, beside everything else."""
        while True:
            await asyncio.sleep(WRITE_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting, self._buffered = self._waiting, [], 0
        if not waiting:
            return
        try:
            await asyncio.to_thread(self._write, waiting)
        except OSError as error:
            self.dropped += len(waiting)
            self._path = None  # what follows must be complete in itself
            if self._working:
                log.warning("%s cannot be written (%s): the recording has a gap", self._folder, error)
            self._working = False
            return
        if not self._working:
            log.info("%s is written again", self._folder)
        self._working = True

    def _write(self, waiting: list[tuple[Path, bytes]]) -> None:
        by_file: dict[Path, list[bytes]] = {}
        for path, line in waiting:
            by_file.setdefault(path, []).append(line)
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, lines in by_file.items():
            fresh = not path.exists()
            with path.open("ab") as file:
                if fresh:
                    path.chmod(0o600)
                file.write(b"".join(lines))
            if fresh:
                self._remove_old()

    def _remove_old(self) -> None:
        files = sorted(self._folder.glob(f"traffic-*{ENDING}"))
        for old in files[: -self._files]:
            old.unlink(missing_ok=True)

    def _begin_file_when_due(self) -> None:
        if self._path is not None and self._written < self._max_bytes:
            return
        self._began += 1
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self._path = self._folder / f"traffic-{stamp}-{self._began:04d}{ENDING}"
        self._written = 0
        self._known.clear()
        self._lengths.clear()
        self._put(RecordedHead(chunk_tokens=self._chunk_tokens))

    def _put(self, line: Line) -> None:
        raw = _encoder.encode(line) + b"\n"
        if self._buffered + len(raw) > MAX_BUFFER:
            self.dropped += 1
            if self._path is not None:
                log.warning("recordings cannot be written as fast as they come: one has a gap")
            self._path = None  # what follows must be complete in itself
            return
        if self._path is not None:
            self._waiting.append((self._path, raw))
            self._buffered += len(raw)
            self._written += len(raw)
            self.lines += 1

    # ------------------------------------------------------------ what is recorded

    def _lengths_of(self, ids: Sequence[str], sizes: Sequence[int], total: int) -> list[int]:
        """Tokens of messages with these ids and bytes of JSON: as remembered, and by bytes what that leaves of the
        ``total`` the engine counted."""
        known = [self._lengths.get(name) for name in ids]
        left = total - sum(length or 0 for length in known)
        unknown = sum(size for size, length in zip(sizes, known, strict=True) if length is None)
        out = []
        for name, size, length in zip(ids, sizes, known, strict=True):
            if length is None:
                share = round(left * size / unknown) if left > 0 and unknown else size // BYTES_PER_TOKEN
                left, unknown = left - share, unknown - size
                length = self._lengths[name] = max(share, 1 if size else 0)
                if len(self._lengths) > MAX_LENGTHS:
                    self._lengths.popitem(last=False)
            out.append(length)
        return out

    def _message(self, message: Any, name: str, tok: int) -> TraceMessage:
        message = message if isinstance(message, dict) else {}
        calls = message.get("tool_calls")
        answered = message.get("tool_call_id")
        return TraceMessage(
            id=name,
            role=str(message.get("role"))[:20],
            tok=tok,
            calls=tuple(self._tool_use(call) for call in (calls if isinstance(calls, list) else ())),
            results=(self._id(str(answered).encode()),) if answered else (),
            thinking=bool(message.get("reasoning") or message.get("reasoning_content")),
        )

    def _tool_use(self, call: Any) -> ToolUse:
        facts = tool_facts(call)
        return ToolUse(
            id=self._id(str(call.get("id") if isinstance(call, dict) else None).encode()),
            name=facts.name,
            program=facts.program,
            timeout_ms=None if facts.timeout_s is None else 1000 * facts.timeout_s,
            background=facts.background,
            subagent="agent" if facts.agent else None,
        )

    def _name(self, key: SessionKey) -> str:
        return self._id("\0".join(key).encode())

    def _id(self, text: bytes) -> str:
        return hashlib.blake2b(text, key=self._key, digest_size=8).hexdigest()


def _kept(known: _Known, hashes: Sequence[bytes], messages: Sequence[Any], head: int) -> int:
    """How many of a conversation's messages behind the head, its last reply included, a prompt with the same head
    goes on from."""
    shared = common_prefix(known.hashes, hashes)
    kept = shared - head
    if kept < 0 or shared < len(known.hashes) or len(messages) < shared:
        return max(0, kept)
    reply = messages[shared - 1]
    if not isinstance(reply, dict) or reply.get("role") != "assistant":
        return kept
    return kept + (known.reply is None or reply_name(reply) == known.reply)
