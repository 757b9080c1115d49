"""How requests find their conversations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.messages import message_hashes
from kvpilot.domain import SessionRef, SessionState, SignalKind, Space
from kvpilot.sessions.book import Change, SessionBook, Started

SPACE = Space("m")
SYSTEM = {"role": "system", "content": "rules"}


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


class Talk:
    def __init__(self) -> None:
        self.book = SessionBook()
        self.now = 0.0
        self.count = 0

    def ask(
        self, *messages: dict[str, str], session: str | None = None, parent: str | None = None
    ) -> Started:
        self.now += 1.0
        self.count += 1
        head = 2 if messages and messages[0]["role"] == "system" else 0
        return self.book.start(
            tenant="t",
            ref=SessionRef(session, parent, "x"),
            space=SPACE,
            hashes=message_hashes({"messages": list(messages)}),
            head=head,
            request_id=f"r{self.count}",
            now=self.now,
        )

    def turn(
        self, *messages: dict[str, str], session: str | None = None, parent: str | None = None
    ) -> Started:
        started = self.ask(*messages, session=session, parent=parent)
        self.now += 1.0
        self.book.finish(started.session, started.thread, tools=(), asked=True, now=self.now)
        return started


def test_a_growing_conversation_without_an_id_stays_one_session() -> None:
    talk = Talk()
    messages = [SYSTEM, say("user", "a")]
    first = talk.turn(*messages)
    for n in range(4):
        messages += [say("assistant", f"reply {n}"), say("user", f"more {n}")]
        again = talk.turn(*messages)
        assert again.session is first.session
        assert again.change is Change.CONTINUED
    assert again.session.turns == 5


def test_two_conversations_with_the_same_system_prompt_are_two_sessions() -> None:
    talk = Talk()
    one, two = talk.turn(SYSTEM, say("user", "a")), talk.turn(SYSTEM, say("user", "b"))
    assert one.session is not two.session


def test_the_same_opening_twice_at_once_is_two_sessions() -> None:
    talk = Talk()
    one, two = talk.ask(SYSTEM, say("user", "a")), talk.ask(SYSTEM, say("user", "a"))
    assert one.session is not two.session


def test_editing_behind_a_reply_is_a_break_of_that_conversation() -> None:
    talk = Talk()
    opening = [SYSTEM, say("user", "a")]
    first = talk.turn(*opening)
    talk.turn(*opening, say("assistant", "r1"), say("user", "b"))
    talk.turn(*opening, say("assistant", "r1"), say("user", "b"), say("assistant", "r2"), say("user", "c"))
    edited = talk.turn(*opening, say("assistant", "r1"), say("user", "other"))
    assert edited.session is first.session
    assert edited.change is Change.BROKEN


def test_an_id_keeps_a_compacted_conversation_together() -> None:
    talk = Talk()
    first = talk.turn(SYSTEM, say("user", "a"), session="s")
    compacted = talk.turn(SYSTEM, say("user", "summary of a"), session="s")
    assert compacted.thread is first.thread
    assert compacted.change is Change.BROKEN


def test_another_system_prompt_under_the_same_id_is_another_thread() -> None:
    talk = Talk()
    main = talk.turn(SYSTEM, say("user", "a"), session="s")
    side = talk.turn(say("system", "title"), say("user", "a"), session="s")
    assert side.session is main.session
    assert side.thread is not main.thread
    assert side.change is Change.NEW


def test_pauses_are_told_when_they_end() -> None:
    talk = Talk()
    started = talk.ask(SYSTEM, say("user", "a"), session="s")
    talk.book.finish(started.session, started.thread, tools=["bash"], asked=True, now=10.0)
    assert started.session.state is SessionState.WAITING_TOOL
    talk.now = 12.5
    again = talk.ask(SYSTEM, say("user", "a"), say("assistant", "x"), session="s")
    assert again.pause is not None
    assert (again.pause.state, again.pause.tools, again.pause.seconds) == (
        SessionState.WAITING_TOOL,
        ("bash",),
        3.5,
    )


def test_parents_children_and_cycles() -> None:
    talk = Talk()
    talk.turn(SYSTEM, say("user", "a"), session="p")
    talk.turn(say("user", "b"), session="c", parent="p")
    talk.turn(say("user", "d"), session="g", parent="c")
    talk.turn(SYSTEM, say("user", "a2"), session="p", parent="g")
    root = talk.book.get("t", "p")
    assert root is not None
    assert [s.id for s in talk.book.tree(root)] == ["p", "c", "g"]
    assert root.parent is None


def test_a_signal_for_an_unknown_session_changes_nothing() -> None:
    talk = Talk()
    assert talk.book.signal("t", SessionRef("nobody"), SignalKind.END, None, 1.0) is None
    assert not talk.book.sessions


def test_dropping_a_session_leaves_no_trace() -> None:
    talk = Talk()
    started = talk.turn(SYSTEM, say("user", "a"))
    talk.book.drop(started.session)
    assert not talk.book.sessions
    assert not (talk.book._content or talk.book._owners)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["ab", "cd"])),
        min_size=1,
        max_size=25,
    )
)
def test_any_traffic_keeps_the_tree_and_the_indices_consistent(steps: list[tuple[int, int, str]]) -> None:
    talk = Talk()
    contexts: dict[int, list[dict[str, str]]] = {}
    for who, keep, text in steps:
        kept = contexts.get(who, [SYSTEM])[: 1 + keep]
        contexts[who] = [*kept, say("assistant", f"r{len(kept)}"), say("user", text)]
        started = talk.turn(*contexts[who], session=None if who == 0 else f"s{who}")
        assert started.thread.owner in started.session.threads
        assert talk.book.thread(started.thread.owner) is started.thread
        assert started.thread.in_flight == 0
        assert list(started.thread.hashes) == message_hashes({"messages": contexts[who]})
    for session in list(talk.book.sessions.values()):
        talk.book.drop(session)
    assert not (talk.book._content or talk.book._owners)
