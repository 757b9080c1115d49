"""Frames between gateway and coordinator arrive whole and in order, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from unittest.mock import patch

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.event_wire import EventReceiver, EventSender, _FrameReader

SIZES = [1, 5, 70_000, 3, 400_000, 1, 20_000_000, 2]


def nothing() -> None: ...


async def connect(path: Path, sender: EventSender) -> None:
    await asyncio.get_running_loop().create_unix_connection(lambda: sender, str(path))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def test_frames_of_any_size_arrive_in_order(tmp_path: Path) -> None:
    frames = [bytes([number]) * size for number, size in enumerate(SIZES)]
    waiting = list(frames)
    taken: list[bytes] = []
    receiver = EventReceiver(tmp_path / "events", lambda frame: taken.append(bytes(frame)))
    await receiver.start()

    def flush() -> None:
        while waiting and sender.ready:
            sender.send(waiting.pop(0))

    sender = EventSender(flush, nothing)
    await connect(tmp_path / "events", sender)
    flush()
    assert waiting, "what the other end has not taken must wait where it is counted"
    await until(lambda: len(taken) == len(frames))
    assert taken == frames
    receiver.stop()
    await until(lambda: not sender.connected)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=12), st.lists(st.integers(1, 97), min_size=1))
@settings(deadline=None)
def test_frames_are_the_same_however_their_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    taken: list[bytes] = []
    with patch("kvpilot.event_wire._READ_BUFFER", 64):
        reader = _FrameReader(lambda frame: taken.append(bytes(frame)), set())
        data = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
        for cut in cycle(cuts):
            if not data:
                break
            buffer = reader.get_buffer(-1)
            size = min(cut, len(buffer), len(data))
            assert size, "there must always be room to read on"
            buffer[:size] = data[:size]
            buffer.release()
            data = data[size:]
            reader.buffer_updated(size)
    assert taken == frames


async def test_what_is_no_frame_ends_its_own_connection_only(tmp_path: Path) -> None:
    taken: list[bytes] = []
    receiver = EventReceiver(tmp_path / "events", lambda frame: taken.append(bytes(frame)))
    await receiver.start()
    sender = EventSender(nothing, nothing)
    await connect(tmp_path / "events", sender)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "events"))
    writer.write(b"\xff" * 100)
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    sender.send(b"hello")
    await until(lambda: taken == [b"hello"])
    writer.close()
    sender.close()
    receiver.stop()
    await until(lambda: not sender.connected)


async def test_a_receiver_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    dead = EventReceiver(tmp_path / "events", lambda frame: None)
    await dead.start()
    dead.stop()
    taken: list[bytes] = []
    receiver = EventReceiver(tmp_path / "events", lambda frame: taken.append(bytes(frame)))
    await receiver.start()
    sender = EventSender(nothing, nothing)
    await connect(tmp_path / "events", sender)
    sender.send(b"hello")
    await until(lambda: taken == [b"hello"])
    sender.close()
    receiver.stop()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("size", [10, 20_000_000])
def test_a_frame_that_is_cut_off_is_told(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], size: int
) -> None:
    """A large one is half written when the other end goes, a small one finds it gone."""

    async def cut_off() -> tuple[int, bool]:
        with socket(AF_UNIX, SOCK_STREAM) as listener:
            listener.bind(str(tmp_path / "events"))
            listener.listen()
            lost = count()
            sender = EventSender(nothing, lambda: next(lost))
            await connect(tmp_path / "events", sender)
            other, _ = listener.accept()
            if size > 10:
                sender.send(bytes(size))
                other.close()
            else:
                other.close()
                sender.send(bytes(size))
            ready = sender.ready
            await until(lambda: not sender.connected)
            return next(lost), ready

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(cut_off()) == (1, False)
