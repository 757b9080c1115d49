"""What a client sends again under an id it gave before is answered again, and not done again if it was done.

The memory is the log of actions: as long and as durable as that is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from kvpilot.coordinator.actions import ActionLog
from kvpilot.domain import ActionKind, ActionRecord, Command, OutcomeStatus

Execute = Callable[[Command], Awaitable[list[ActionRecord]]]


class Reused(ValueError):
    """An id that stands for something else already."""


class Repeats:
    """Stands before the execution of commands."""

    def __init__(self, actions: ActionLog) -> None:
        self._actions = actions
        self._deciding: dict[tuple[str, str], asyncio.Event] = {}

    async def once(self, command: Command, execute: Execute) -> list[ActionRecord]:
        """The records of ``execute(command)``, or of when it was asked for before, as they stand now.

        Raises Reused where an id of the command was used for another one.
        """
        if not command.client_ids:
            return await execute(command)
        names = [(command.tenant, client_id) for client_id in command.client_ids]
        # Sent twice at once, it is not done twice either.
        while running := next((self._deciding[name] for name in names if name in self._deciding), None):
            await running.wait()
        asked = digest(command)
        for tenant, client_id in names:
            known = self._actions.named(tenant, client_id)
            if any(record.asked != asked for record in known):
                raise Reused(f"{client_id!r} was used for something else before: give new actions new ids")
            if known and not all(map(came_to_nothing, known)):
                return known
            self._actions.unname(known)
        decided = asyncio.Event()
        self._deciding.update(dict.fromkeys(names, decided))
        try:
            records = await execute(command)
            return [self._actions.name(record, command.client_ids, asked) for record in records]
        finally:
            for name in names:
                del self._deciding[name]
            decided.set()


def came_to_nothing(record: ActionRecord) -> bool:
    """Whether what was asked for was not executed, so that it may be tried again under the same id.

    A failed eviction was begun, and the executor goes on with it by itself. A rejected action was decided on:
    the session went on, say, and what it has by now is not what was given up.
    """
    if record.status is OutcomeStatus.FAILED:
        return record.kind is not ActionKind.EVICT
    return record.status is OutcomeStatus.MISSING


def digest(command: Command) -> str:
    """Of what is asked for. Not of the request around it: a repeat may come in another one."""
    what = (
        command.kind,
        command.salt,
        command.session.id,
        command.target,
        command.start,
        command.end,
        command.chunks,
    )
    return hashlib.blake2s(msgspec.msgpack.encode(what), digest_size=8).hexdigest()
