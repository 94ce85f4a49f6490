"""The other order of prompts: nothing is lost, stable text comes first, and what it brings is what a plan finds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches.prompt_advice import Chat, other_order, pieces

RULES = "Sort the text into one of four groups, please."
ROLE = "You are a careful assistant that reads tickets."


def user(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


texts = st.text(alphabet="ab .!?:\n\t", max_size=40)
parts = st.one_of(st.sampled_from([RULES, ROLE, "Thanks."]), texts)
contents = st.lists(parts, max_size=5).map("\n".join)
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant"]),
    st.one_of(contents, st.just([{"type": "text", "text": RULES}])),
)
chats = st.lists(st.lists(messages, min_size=1, max_size=4), max_size=12)


def bag(chat: Chat) -> Counter[str]:
    """All that a chat says, whatever its order and white space."""
    said: Counter[str] = Counter()
    for message in chat:
        content = message["content"]
        said.update(part.strip() for part in (pieces(content) if isinstance(content, str) else [repr(content)]))
    return said


@given(st.text(max_size=200) | contents)
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == (text if text.strip() else "")
    assert all(piece.strip() for piece in pieces(text))


@given(chats)
def test_nothing_is_added_or_lost(given_chats: list[Chat]) -> None:
    other = other_order(given_chats)
    if other is None:
        return
    assert len(other.chats) == len(given_chats)
    changed = 0
    for before, after in zip(given_chats, other.chats, strict=True):
        assert bag(before) == bag(after)
        assert Counter(message["role"] for message in before) == Counter(message["role"] for message in after)
        if any(message["role"] == "assistant" for message in before):
            assert [message["role"] for message in before] == [message["role"] for message in after]
            for one, two in zip(before, after, strict=True):
                assert one["role"] != "assistant" or one == two, "answers stay as they are"
        changed += before != after
    assert changed <= other.num_moved
    assert 1 <= len(other.misplaced) <= 3
    for found in other.misplaced:
        content = given_chats[found.chat][found.message]["content"]
        assert found.text in content


@given(chats)
def test_the_other_order_is_final(given_chats: list[Chat]) -> None:
    other = other_order(given_chats)
    assert other is None or other_order(other.chats) is None


@given(chats, st.randoms(use_true_random=False))
def test_the_order_of_the_lines_does_not_matter(given_chats: list[Chat], random: Any) -> None:
    order = list(range(len(given_chats)))
    random.shuffle(order)
    one, two = other_order(given_chats), other_order([given_chats[index] for index in order])
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert [one.chats[index] for index in order] == two.chats
        assert one.num_moved == two.num_moved
        assert {(found.text, found.chats) for found in one.misplaced} == {
            (found.text, found.chats) for found in two.misplaced
        }


def test_rules_behind_a_ticket_come_first() -> None:
    other = other_order([user(f"Ticket {i}: it is late\n{RULES}") for i in range(10)])
    assert other is not None and other.num_moved == 10
    assert other.chats[3] == user(f"{RULES}\nTicket 3: it is late")
    (found,) = other.misplaced
    assert (found.text, found.chats, found.chat, found.message) == (RULES, 10, 0, 0)


def test_stable_text_in_the_middle_comes_first() -> None:
    other = other_order([user(f"Case {i}.\n{ROLE}\n{RULES}\nText {i}") for i in range(4)])
    assert other is not None
    assert other.chats[1] == user(f"{ROLE}\n{RULES}\nCase 1.\nText 1")


def test_whole_messages_move_unless_somebody_answers_them() -> None:
    moved = other_order([user(f"Ticket {i}", RULES) for i in range(4)])
    assert moved is not None and moved.chats[2] == user(RULES, "Ticket 2")
    dialogue = [[*user(f"Ticket {i}"), {"role": "assistant", "content": "Yes?"}, *user(RULES)] for i in range(4)]
    assert other_order(dialogue) is None


def test_what_stands_first_or_is_rare_or_short_stays() -> None:
    assert other_order([]) is None
    assert other_order([user(f"{RULES}\nTicket {i}") for i in range(10)]) is None
    assert other_order([user(f"Ticket {i}\nThank you.") for i in range(10)]) is None
    assert other_order([user(f"Ticket {i}\nThis sentence is in one line only, as {i} says") for i in range(10)]) is None
    many = [user(f"Ticket {i}" + (f"\n{RULES}" if i < 2 else "")) for i in range(200)]
    assert other_order(many) is None, "two of 200 are too few to rearrange prompts for"
