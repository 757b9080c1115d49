"""What the book knows of sessions: what goes on with what, what is given up, and who ranks before whom."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.messages import common_prefix
from kvpilot.engine import book as limits
from kvpilot.engine.book import Book, Context, Hash

SIZE = 4


def chain(*parts: str) -> list[Hash]:
    return ["/".join(parts[: i + 1]).encode() for i in range(len(parts))]


def turn(
    book: Book, name: str, hashes: Sequence[Hash], now: float, salt: str = "", parent: str | None = None
) -> Context:
    """A request that has ended, without output."""
    context = book.begin((salt, name), hashes, now, parent=parent)
    book.finish(context, hashes, list(range(len(hashes) * SIZE)), now)
    return context


def order(book: Book, now: float) -> list[str]:
    """Sessions by rank, worst first."""
    numbers = {context.number: context for context in book.contexts()}
    found = [numbers[number].session for number in book.ranking(now).ascending]
    return [session.key[1] if session else "a wish" for session in found]


def test_a_longer_prompt_goes_on_and_what_it_no_longer_has_is_given_up() -> None:
    book = Book(SIZE, 100)
    lost: list[tuple[int, int]] = []
    book.on_lost = lambda number, length: lost.append((number, length))
    first = turn(book, "s", chain("a", "b", "c", "d", "e", "old"), 0.0)
    again = turn(book, "s", chain("a", "b", "c", "d", "e", "new", "more"), 1.0)
    assert again is first and lost == [(first.number, 5 * SIZE)]
    assert book.claimed.get(chain("a", "b", "c", "d", "e", "old")[-1]) is None
    assert book.claimed.get(chain("a", "b", "c", "d", "e", "new")[-1]) == first.number


def test_another_conversation_under_the_same_id_leaves_the_first_alone() -> None:
    book = Book(SIZE, 100)
    first = turn(book, "s", chain("system", "a", "b", "c"), 0.0)
    side = turn(book, "s", chain("system", "x"), 1.0)
    assert side is not first
    assert book.claimed.get(chain("system")[0]) == {first.number, side.number}
    assert turn(book, "s", chain("system", "a", "b", "c", "d"), 2.0) is first


def test_two_requests_of_a_session_at_once_are_two_conversations() -> None:
    book = Book(SIZE, 100)
    one = book.begin(("", "s"), chain("a", "b"), 0.0)
    other = book.begin(("", "s"), chain("a", "b", "c"), 0.0)
    assert one is not other


def test_a_compaction_that_is_announced_gives_up_the_rest() -> None:
    book = Book(SIZE, 100)
    turn(book, "s", chain("system", "a", "b", "c"), 0.0)
    book.begin(("", "s"), chain("system", "summary"), 1.0, supersedes=True)
    assert book.claimed.get(chain("system", "a")[1]) is None
    assert book.claims == 2


def test_conversations_under_one_id_are_bounded_and_the_oldest_is_forgotten() -> None:
    book = Book(SIZE, 1000)
    for i in range(limits.MAX_THREADS + 3):
        turn(book, "s", chain(f"t{i}", "a"), float(i))
    session = book.get(("", "s"))
    assert session is not None and len(session.contexts) == limits.MAX_THREADS
    assert book.claimed.get(chain("t0")[0]) is None


def test_claims_are_bounded_by_the_pool() -> None:
    book = Book(SIZE, 4)
    for i in range(100):
        turn(book, f"s{i}", chain(f"s{i}", "a", "b"), float(i))
    assert book.claims <= 8 * 4


def test_tokens_are_those_of_the_context_however_it_grew() -> None:
    book = Book(SIZE, 100)
    context = book.begin(("", "s"), chain("a", "b"), 0.0)
    book.finish(context, chain("a", "b", "old"), list(range(13)), 0.0)
    context = book.begin(("", "s"), chain("a", "b", "new"), 1.0)
    told = [*range(8), 90, 91, 92, 93, 94]
    book.finish(context, chain("a", "b", "new"), told, 1.0)
    assert list(context.tokens) == told


def test_ending_a_tree_ends_descendants_and_spares_others() -> None:
    book = Book(SIZE, 100)
    turn(book, "root", chain("a"), 0.0)
    turn(book, "child", chain("b"), 0.0, parent="root")
    turn(book, "grandchild", chain("c"), 0.0, parent="child")
    turn(book, "other", chain("d"), 0.0)
    assert set(book.end(("", "root"), tree=True)) == {chain(x)[0] for x in "abc"}
    assert len(book) == 1


def test_sessions_of_two_tenants_share_nothing_but_a_name() -> None:
    book = Book(SIZE, 100)
    turn(book, "s", chain("a"), 0.0, salt="one")
    turn(book, "s", chain("b"), 0.0, salt="two")
    book.end(("one", "s"), tree=True)
    assert book.get(("two", "s")) is not None and book.claimed.get(chain("b")[0]) is not None


def test_demoted_rank_below_live_and_retained_above_until_the_wish_ends() -> None:
    book = Book(SIZE, 100)
    for name in ("kept", "demoted", "live"):
        turn(book, name, chain(name), 0.0)
    book.demote(("", "demoted"))
    book.retain(("", "kept"), until=10.0, now=0.0)
    assert order(book, 1.0) == ["demoted", "live", "kept"]
    assert order(book, 11.0)[-1] != "kept" or order(book, 11.0)[0] == "demoted"
    turn(book, "demoted", chain("demoted", "again"), 12.0)
    assert order(book, 12.5)[0] != "demoted", "its next request takes the demotion back"


def only_context(book: Book, name: str) -> Context:
    session = book.get(("", name))
    assert session is not None
    [context] = session.contexts
    return context


def test_a_context_somebody_tells_of_is_claimed_and_no_return_of_its_session() -> None:
    book = Book(SIZE, 100)
    turn(book, "a", chain("x", "y"), 0.0)
    context = only_context(book, "a")
    book.learn(("", "a"), chain("x", "y", "z"), range(3 * SIZE), 1.0)
    assert only_context(book, "a") is context
    assert (context.hashes, len(context.tokens)) == (chain("x", "y", "z"), 3 * SIZE)
    assert context.waits_since == 0.0, "it waits as long as before"
    book.learn(("", "b"), chain("p"), range(SIZE), 2.0)
    assert book.claimed[chain("p")[0]] == only_context(book, "b").number


def test_what_others_took_from_a_session_counts_until_its_next_request() -> None:
    book = Book(SIZE, 100)
    for name in ("a", "b"):
        turn(book, name, chain(name), 0.0)
    book.gave(only_context(book, "a").number, 3)
    book.gave(only_context(book, "b").number, 1)
    assert book.displaced(9) == [(("", "a"), 3), (("", "b"), 1)] and book.displaced(1) == [(("", "a"), 3)]
    turn(book, "a", chain("a", "more"), 1.0)
    assert (book.displaced(9), book.taken) == ([(("", "b"), 1)], 4)


def test_who_is_expected_soon_ranks_above_who_left_earlier_or_later() -> None:
    book = Book(SIZE, 100)
    for name in ("a", "soon", "b"):
        turn(book, name, chain(name), 0.0)
    book.expect(only_context(book, "soon"), at=101.0)
    assert order(book, 100.0)[-1] == "soon"


def test_who_is_due_any_moment_ranks_above_who_has_just_left_for_a_while() -> None:
    book = Book(SIZE, 100)
    turn(book, "due", chain("a"), 0.0)
    turn(book, "just left", chain("b"), 99.0)
    book.due(only_context(book, "due"), until=110.0)
    assert order(book, 100.0)[-1] == "due"
    assert order(book, 111.0)[-1] == "just left"


def test_of_requests_that_queue_who_came_first_is_served_next_and_ranks_highest() -> None:
    book = Book(SIZE, 100)
    for at, name in enumerate("abc"):
        turn(book, name, chain(name), float(at))
    assert order(book, 10.0) == ["a", "b", "c"]
    for at, name in enumerate("ab"):
        book.begin(("", name), chain(name), 11.0 + at)
    assert order(book, 20.0) == ["c", "b", "a"]


def test_whose_request_has_just_come_ranks_above_all_before_the_next_ranking() -> None:
    book = Book(SIZE, 100)
    first, second = (turn(book, name, chain(name), 0.0) for name in "ab")
    ranking = book.ranking(1.0)
    book.begin(("", "a"), chain("a"), 1.1)
    assert book.ranking(1.2) is ranking
    assert ranking.best({first.number, second.number}) == first.number


def test_a_wish_that_comes_with_a_request_ranks_at_once_without_a_new_ranking() -> None:
    book = Book(SIZE, 100)
    wished, other = (turn(book, name, chain(name), 0.0) for name in "ab")
    ranking = book.ranking(1.0)
    book.retain(("", "a"), until=100.0, now=1.1)
    assert book.ranking(1.2) is ranking and ranking.of(wished.number) > ranking.of(other.number)
    assert order(book, 5.0) == ["b", "a"]


def test_sessions_away_for_long_rank_below_those_that_just_left() -> None:
    book = Book(SIZE, 100)
    turn(book, "yesterday", chain("a"), 0.0)
    turn(book, "now", chain("b"), 3000.0)
    assert order(book, 3001.0) == ["yesterday", "now"]


def test_wishes_beyond_the_budget_are_not_heard_and_tenants_share_it() -> None:
    book = Book(SIZE, pool_blocks=20)  # Half of it for wishes: five blocks for each of two tenants.
    big = [f"b{i}" for i in range(8)]
    turn(book, "greedy", chain(*big), 0.0, salt="one")
    turn(book, "modest", chain("m", "n"), 0.0, salt="two")
    for salt, name in (("one", "greedy"), ("two", "modest")):
        book.retain((salt, name), until=100.0, now=0.0)
    turn(book, "live", chain("x"), 50.0)
    assert order(book, 50.5) == ["greedy", "live", "modest"]


def test_a_wish_for_blocks_holds_them_for_its_time() -> None:
    book = Book(SIZE, 100)
    book.retain_blocks("", chain("a", "b"), until=5.0, now=0.0)
    book.tick(4.0)
    assert book.claimed.get(chain("a")[0]) is not None
    book.tick(5.0)
    assert book.claimed.get(chain("a")[0]) is None and book.claims == 0


def test_who_is_not_heard_of_for_hours_is_forgotten() -> None:
    book = Book(SIZE, 100)
    turn(book, "s", chain("a"), 0.0)
    book.tick(limits.IDLE_S + 1)
    assert len(book) == 0 and book.claims == 0


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_common_blocks_is_the_common_prefix(one: list[str], other: list[str]) -> None:
    plain = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    want = min(len(one), len(other)) if plain is None else plain
    assert common_prefix(chain(*one), chain(*other)) == want
