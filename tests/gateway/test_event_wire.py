"""Frames between gateway and coordinator arrive whole and in order, or not at all."""

from __future__ import annotations

import asyncio
import mmap
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import cast
from unittest.mock import patch

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvpilot import event_wire
from kvpilot.domain import (
    Event,
    PromptKnown,
    RequestFinished,
    RequestStarted,
    Retention,
    SessionRef,
    Signal,
    SignalKind,
)
from kvpilot.event_ring import Room, share
from kvpilot.event_wire import EventReceiver, EventSender, _FrameReader
from kvpilot.link import event_decoder, event_frame

SIZES = [1, 5, 70_000, 3, 400_000, 1, 20_000_000, 2]


def nothing(*_: object) -> None: ...


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
        while waiting and sender.send(waiting[0]):
            waiting.pop(0)

    sender = EventSender(flush, nothing)
    await sender.connect(tmp_path / "events")
    flush()
    assert waiting, "what the other end has not taken must wait where it is counted"
    await until(lambda: len(taken) == len(frames))
    assert taken == frames
    receiver.stop()
    await until(lambda: not sender.connected)


class _Answers:
    """The transport of a reader."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.booleans()), max_size=12),
    st.lists(st.integers(1, 97), min_size=1),
)
def test_frames_are_the_same_however_their_bytes_are_cut(
    frames: list[tuple[bytes, bool]], cuts: list[int]
) -> None:
    """Those in the memory and those that come through the socket."""
    taken: list[bytes] = []
    answers = _Answers()
    with mmap.mmap(-1, 4096) as memory, patch("kvpilot.event_wire._READ_BUFFER", 64):
        reader = _FrameReader(lambda frame: taken.append(bytes(frame)), set(), memory)
        reader.connection_made(cast("asyncio.Transport", answers))
        data, at = b"", 0
        for frame, in_memory in frames:
            length = len(frame)
            if in_memory:
                memory[at : at + length] = frame
                data += (1 << 31 | length).to_bytes(4, "big") + at.to_bytes(4, "big")
                at += length
            else:
                data += length.to_bytes(4, "big") + frame
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
    assert taken == [frame for frame, _ in frames]
    told = [int.from_bytes(answers.data[n : n + 4], "big") for n in range(0, len(answers.data), 4)]
    assert sum(told) == sum(in_memory for _, in_memory in frames)


@given(st.lists(st.one_of(st.integers(1, 100), st.just(0)), max_size=60))
def test_places_in_use_never_overlap(steps: list[int]) -> None:
    """A number takes a place of that many bytes, nought gives the oldest back."""
    room = Room(100)
    used: list[tuple[int, int]] = []
    for step in steps:
        if not step:
            if used:
                room.give_back(1)
                used.pop(0)
            else:
                with pytest.raises(IndexError):
                    room.give_back(1)
            continue
        at = room.take(step)
        if at is None:
            assert used, "what fits has a place where nothing is in use"
            continue
        assert at >= 0 and at + step <= 100
        assert all(at + step <= begin or at >= end for begin, end in used)
        used.append((at, at + step))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_more_than_the_memory_holds_arrives_in_order(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Far more long frames than fit at a time, small ones among them, each in two parts."""

    async def send() -> None:
        sums: list[int] = []
        receiver = EventReceiver(tmp_path / "events", lambda frame: sums.append(zlib.crc32(frame)))
        await receiver.start()
        sender = EventSender(nothing, nothing)
        await sender.connect(tmp_path / "events")
        sent = []
        for number in range(200):
            frame = number.to_bytes(4, "big") * (50_000 if number % 3 else 20)
            sent.append(zlib.crc32(frame))
            await until(lambda frame=frame: sender.send(frame[:100], frame[100:]))  # type: ignore[misc]
        await until(lambda: len(sums) == len(sent))
        assert sums == sent
        sender.close()
        receiver.stop()
        await until(lambda: not sender.connected)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(send())


async def test_who_says_it_took_what_was_never_sent_is_left(tmp_path: Path) -> None:
    with socket(AF_UNIX, SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "events"))
        listener.listen()
        sender = EventSender(nothing, nothing)
        await sender.connect(tmp_path / "events")
        other, _ = listener.accept()
        other.send((7).to_bytes(4, "big"))
        await until(lambda: not sender.connected)
        other.close()


@pytest.mark.parametrize("place", [0, 1 << 30])
async def test_a_note_of_what_is_not_in_the_memory_ends_its_connection(tmp_path: Path, place: int) -> None:
    taken: list[bytes] = []
    receiver = EventReceiver(tmp_path / "events", lambda frame: taken.append(bytes(frame)))
    await receiver.start()
    with socket(AF_UNIX, SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.connect(str(tmp_path / "events"))
        memory = share(connection, 8192)
        connection.send((1 << 31 | 8193).to_bytes(4, "big") + place.to_bytes(4, "big"))
        loop = asyncio.get_running_loop()
        with suppress(ConnectionResetError):
            assert await loop.sock_recv(connection, 1) == b""
        memory.close()
    assert taken == []
    receiver.stop()


async def test_what_is_no_frame_ends_its_own_connection_only(tmp_path: Path) -> None:
    taken: list[bytes] = []
    receiver = EventReceiver(tmp_path / "events", lambda frame: taken.append(bytes(frame)))
    await receiver.start()
    sender = EventSender(nothing, nothing)
    await sender.connect(tmp_path / "events")
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
    await sender.connect(tmp_path / "events")
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

    async def cut_off() -> int:
        with socket(AF_UNIX, SOCK_STREAM) as listener:
            listener.bind(str(tmp_path / "events"))
            listener.listen()
            lost: list[int] = []
            sender = EventSender(nothing, lost.append)
            await sender.connect(tmp_path / "events")
            other, _ = listener.accept()
            if size > 10:
                assert sender.send(bytes(size))
                assert not sender.send(b"x"), "what comes behind waits where it is counted"
                other.close()
            else:
                other.close()
                sender.send(bytes(size))
            await until(lambda: not sender.connected)
            return sum(lost)

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(cut_off()) == 1


async def test_what_comes_close_together_wakes_the_other_end_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for a machine that stands still meanwhile.
    monkeypatch.setattr(event_wire, "_TOGETHER_S", 0.5)
    taken: list[bytes] = []
    receiver = EventReceiver(tmp_path / "events", lambda frame: taken.append(bytes(frame)))
    await receiver.start()
    sender = EventSender(nothing, nothing)
    await sender.connect(tmp_path / "events")
    frames = [bytes([number]) * (10 if number % 2 else 50_000) for number in range(10)]
    with patch.object(
        _FrameReader, "buffer_updated", autospec=True, side_effect=_FrameReader.buffer_updated
    ) as woken:
        for frame in frames:
            sender.send(frame)
        await until(lambda: len(taken) == len(frames))
    assert taken == frames
    assert woken.call_count == 2
    sender.close()
    receiver.stop()


async def test_what_waits_is_told_when_the_other_end_goes(tmp_path: Path) -> None:
    lost: list[int] = []
    with socket(AF_UNIX, SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "events"))
        listener.listen()
        sender = EventSender(nothing, lost.append)
        await sender.connect(tmp_path / "events")
        for _ in range(3):
            sender.send(b"hello")
        other, _ = listener.accept()
        other.close()
        await until(lambda: not sender.connected)
    assert lost == [2]


@given(
    st.integers(0, 40_000),
    st.sampled_from([
        RequestStarted("r", 1.5, "t", "s", SessionRef(id="a"), "/v1/x", retention=Retention(ttl_s=3.0)),
        PromptKnown("r", 1.5),
        RequestFinished("r", 1.5, 200, 1.0, b"", b"[1]", "stop", b"{}", 3, 2, 1, True),
        Signal(1.5, "t", SessionRef(id="a"), SignalKind.END),
    ]),
)  # fmt: skip
def test_an_event_in_two_pieces_is_the_event(size: int, event: Event) -> None:
    fields = {"body", "prompt_ids"} & set(event.__struct_fields__)
    event = replace(event, **dict.fromkeys(fields, bytes(size)))
    head, rest = event_frame(event)
    assert event_decoder.decode(head + rest) == event
    assert bool(rest) == (bool(fields) and size >= 16 * 1024)
