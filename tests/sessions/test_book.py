"""How requests find their conversations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.conversation import named_replies, opening_texts, reply_name
from kvpilot.context.messages import message_hashes
from kvpilot.domain import SessionRef, SignalKind, Space
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
            opening=opening_texts({"messages": list(messages)}),
            said=lambda: named_replies({"messages": list(messages)}),
        )

    def turn(
        self,
        *messages: dict[str, str],
        session: str | None = None,
        parent: str | None = None,
        tools: tuple[str, ...] = (),
        text: str = "",
        agents: int = 0,
    ) -> Started:
        started = self.ask(*messages, session=session, parent=parent)
        self.now += 1.0
        self.book.finish(
            started.session,
            started.thread,
            tools=tools,
            asked=True,
            now=self.now,
            text=text,
            name=reply_name(say("assistant", text)),
            agents=agents,
        )
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


SUMMARY = "We were asked to fix the build; the cause is a missing flag in the second stage. " * 4


def test_a_compaction_is_known_by_its_summary() -> None:
    talk = Talk()
    old = [SYSTEM, say("user", "a"), say("assistant", "b"), say("user", "summarise")]
    first = talk.turn(*old[:2])
    asked = talk.turn(*old, text=SUMMARY)
    assert asked.session is first.session
    compacted = talk.turn(SYSTEM, say("user", f"This goes on from before. {SUMMARY} Go on."))
    assert compacted.session is first.session
    assert compacted.change is Change.BROKEN


@pytest.mark.parametrize(
    ("text", "tools"), [("ok", ()), (SUMMARY, ("bash",))], ids=["too short", "not a last word"]
)
def test_a_quoted_reply_alone_is_no_summary(text: str, tools: tuple[str, ...]) -> None:
    talk = Talk()
    first = talk.turn(SYSTEM, say("user", "a"), text=text, tools=tools)
    other = talk.turn(SYSTEM, say("user", text))
    assert other.session is not first.session


def test_a_copy_of_a_conversation_is_one_of_its_own_from_its_second_turn_on() -> None:
    talk = Talk()
    history = [SYSTEM, say("user", "a")]
    for n in range(4):
        original = talk.turn(*history)
        history += [say("assistant", f"r{n}"), say("user", f"u{n}")]
    copies = [talk.turn(*history[: 4 + 2 * n]) for n in range(2)]
    assert copies[0].session is not original.session
    assert copies[1].session is copies[0].session
    assert talk.turn(*history).session is original.session
    assert [copy.change for copy in copies] == [Change.NEW, Change.CONTINUED]


def test_copies_that_stand_at_the_same_place_keep_the_same_time() -> None:
    talk = Talk()
    opening = [SYSTEM, say("user", "a")]
    history = [*opening, say("assistant", "r"), say("user", "u")]
    copies, stopped = [], []
    for pause in (0.0, 40.0, 70.0):
        talk.now += pause
        talk.turn(*opening)
        copies.append(talk.turn(*history).session)
        stopped.append(talk.now)
    assert len({session.id for session in copies}) == 3
    # The first one has ended. The second goes on 100 s after its reply, the third 100 s after its own.
    for n in (1, 2):
        talk.now = stopped[n] + 99.0
        last = talk.turn(*history, say("assistant", "r2"), say("user", f"branch {n}"))
    assert last.session is copies[2]


def test_a_stateless_client_that_repeats_itself_is_one_session() -> None:
    talk = Talk()
    assert len({talk.turn(SYSTEM, say("user", "a")).session.id for _ in range(5)}) == 1


def test_ids_that_rotate_are_seen_through() -> None:
    talk = Talk()
    talks = [[SYSTEM, say("user", f"task {n}")] for n in range(3)]
    for turn in range(6):
        for number, messages in enumerate(talks):
            started = talk.turn(*messages, session=f"label-{number}-{turn}")
            assert talk.book.get("t", f"label-{number}-{turn}") is started.session
            messages += [say("assistant", f"r{turn}"), say("user", f"u{turn}")]
    for number in range(3):
        found = {id(talk.book.get("t", f"label-{number}-{turn}")) for turn in range(1, 6)}
        assert len(found) == 1


def test_ids_that_come_again_are_believed_when_a_conversation_goes_on_under_another() -> None:
    talk = Talk()
    messages = [SYSTEM, say("user", "a")]
    talk.turn(*messages, session="a")
    talk.turn(*messages, session="a")
    for n in range(3):
        branch = [*messages, say("assistant", "r"), say("user", f"branch {n}")]
        assert talk.turn(*branch, session=f"branch-{n}").session.id == f"branch-{n}"
        assert talk.turn(*branch, say("assistant", "x"), session=f"branch-{n}").session.id == f"branch-{n}"


def test_an_agent_called_by_a_reply_is_the_childs_parent() -> None:
    talk = Talk()
    main = talk.turn(SYSTEM, say("user", "a"), tools=("Task", "Task"), agents=2)
    talk.now -= 0.5
    children = [talk.ask(say("system", f"helper {n}"), say("user", "do")) for n in range(3)]
    assert [child.session.parent for child in children] == [main.session.key, main.session.key, None]
    tree = talk.book.tree(main.session)
    assert tree[0] is main.session
    assert {session.id for session in tree[1:]} == {child.session.id for child in children[:2]}


def test_an_agent_that_starts_before_its_parents_reply_has_ended_is_its_child() -> None:
    talk = Talk()
    main = talk.ask(SYSTEM, say("user", "a"))
    child = talk.ask(say("system", "helper"), say("user", "do"))
    assert child.session.parent is None
    talk.book.finish(main.session, main.thread, tools=["Task"], asked=True, now=talk.now + 1, agents=1)
    assert child.session.parent == main.session.key


@pytest.mark.parametrize("at_work", [True, False])
def test_who_begins_like_the_caller_and_works_on_behind_its_return_was_no_agent_of_its(at_work: bool) -> None:
    talk = Talk()
    messages = [SYSTEM, say("user", "a")]
    main = talk.turn(*messages, tools=("Task",), agents=1)
    talk.now -= 0.9
    other = talk.turn(SYSTEM, say("user", "do"), tools=("Bash",) if at_work else ())
    assert other.session.parent == main.session.key
    talk.turn(*messages, say("assistant", "r"), say("tool", "done"))
    assert other.session.parent == (None if at_work else main.session.key)
    assert talk.book.tree(main.session) == [main.session, *([] if at_work else [other.session])]


def replied(n: int) -> str:
    return f"This is reply {n}, long enough not to be taken for another one. " * 3


@pytest.mark.parametrize(
    "new",
    [
        [
            SYSTEM,
            say("user", "summary"),
            say("user", "u1"),
            say("assistant", replied(1)),
            say("user", "go on"),
        ],
        [
            SYSTEM,
            say("user", "[cleared]"),
            say("assistant", replied(0)),
            say("user", "u1"),
            say("user", "go on"),
        ],
    ],
    ids=["summary and the last exchange", "cleared in place"],
)
def test_replies_that_come_back_behind_something_else_show_a_compaction(new: list[dict[str, str]]) -> None:
    talk = Talk()
    history = [SYSTEM, say("user", "u0")]
    for n in range(2):
        first = talk.turn(*history, text=replied(n))
        history += [say("assistant", replied(n)), say("user", f"u{n + 1}")]
    compacted = talk.turn(*new)
    assert compacted.session is first.session
    assert compacted.change is Change.BROKEN


def test_replies_that_come_back_under_another_system_prompt_are_anothers() -> None:
    talk = Talk()
    first = talk.turn(SYSTEM, say("user", "u0"), text=replied(0))
    other = talk.turn(say("system", "judge this"), say("user", "x"), say("assistant", replied(0)))
    assert other.session is not first.session


def test_what_two_conversations_were_told_shows_no_compaction_of_either() -> None:
    talk = Talk()
    one = talk.turn(SYSTEM, say("user", "a"), text=replied(0))
    two = talk.turn(SYSTEM, say("user", "b"), text=replied(0))
    third = talk.turn(SYSTEM, say("user", "c"), say("assistant", replied(0)), say("user", "go on"))
    assert third.session not in (one.session, two.session)


def test_siblings_under_one_id_do_not_break_each_other() -> None:
    talk = Talk()
    talks = [[SYSTEM, say("user", f"task {name}")] for name in "ab"]
    changes = []
    for turn in range(4):
        for messages in talks:
            changes.append(talk.turn(*messages, session="s", tools=("bash",)).change)
            messages += [say("assistant", f"call {turn}"), say("tool", f"result {turn}")]
    assert Change.BROKEN not in changes


def test_two_chats_under_one_id_are_told_apart_after_the_first_mistake() -> None:
    talk = Talk()
    talks = [[SYSTEM, say("user", f"question {name}")] for name in "abc"]
    changes = []
    for turn in range(4):
        for messages in talks:
            changes.append(talk.turn(*messages, session="s").change)
            messages += [say("assistant", f"reply {turn}"), say("user", f"more {turn}")]
    assert Change.BROKEN not in changes[3:]


def test_strangers_without_a_system_prompt_do_not_continue_each_other() -> None:
    talk = Talk()
    one = talk.turn()
    two = talk.turn(say("user", "hello"))
    assert one.session is not two.session


def test_branches_of_one_session_are_believed() -> None:
    talk = Talk()
    messages = [SYSTEM, say("user", "a")]
    talk.turn(*messages, session="root")
    for n in range(8):
        branch = [*messages, say("assistant", "r"), say("user", f"branch {n}")]
        started = talk.turn(*branch, session=f"br{n}", parent="root" if n % 2 else None)
        assert started.session.id == f"br{n}"


def test_an_id_that_is_a_session_after_all_is_found_by_it() -> None:
    talk = Talk()
    talk.book._labels.alias(("t", "s"), ("t", "other"))
    talk.turn(SYSTEM, say("user", "x"), session="other")
    real = talk.turn(SYSTEM, say("user", "a"), session="s")
    assert talk.book.get("t", "s") is real.session


def test_a_restored_conversation_is_known_by_its_earlier_replies() -> None:
    talk = Talk()
    history = [SYSTEM, say("user", "u0")]
    for n in range(3):
        first = talk.turn(*history)
        history += [say("assistant", f"r{n}"), say("user", f"u{n + 1}")]
    restored = Talk()
    restored.book.restore(first.session, [first.thread])
    restored.now = talk.now
    rewound = restored.turn(*history[:4], say("assistant", "r1"), say("user", "something else"))
    assert rewound.session is first.session
    assert rewound.change is Change.BROKEN


def test_a_guessed_child_does_not_end_with_its_parent() -> None:
    talk = Talk()
    main = talk.turn(SYSTEM, say("user", "a"), tools=("Task",), agents=1)
    talk.now -= 0.5
    child = talk.ask(say("system", "helper"), say("user", "do"))
    assert child.session.parent == main.session.key
    assert talk.book.tree(main.session, named=True) == [main.session]


def test_an_agent_whose_id_names_no_parent_has_the_one_that_called_it_until_it_names_another() -> None:
    talk = Talk()
    talk.turn(SYSTEM, say("user", "a"), session="main", tools=("Task",), agents=1)
    child = talk.turn(say("system", "sub rules"), say("user", "task"), session="sub").session
    assert (child.parent, child.parent_guessed) == (("t", "main"), True)
    talk.turn(say("system", "sub rules"), say("user", "task"), session="sub", parent="other")
    assert (child.parent, child.parent_guessed) == (("t", "other"), False)
    main, other = talk.book.get("t", "main"), talk.book.get("t", "other")
    assert main is not None and main.children == set()
    assert other is not None and other.children == {("t", "sub")}
