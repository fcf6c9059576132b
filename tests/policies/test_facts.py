"""Facts about a request: its turn, from its blocks or labels, and only the labels that are needed."""

from __future__ import annotations

from math import log

import pytest

from radixkv_policies import RequestHints
from radixkv_policies.facts import Facts, labels_of
from radixkv_policies.hints import Label


def turns(*requests: tuple[int, int, dict[str, Label]]) -> list[int]:
    """The turns of requests that each start with blocks of the previous one: the number of common blocks, the length,
    the labels.
    """
    found, earlier = [], None
    for common, length, labels in requests:
        facts = Facts(labels, 0)
        if earlier is not None:
            facts.found(common, earlier, 60.0)
        facts.computed(length - common, length)
        found.append(facts.turn)
        earlier = facts
    return found


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"session": "a"}, 2),
        ({"session": "b"}, 1),
        ({}, 1),
        ({"session": "b", "turn": 7}, 7),
    ],
)
def test_a_session_label_gives_the_turn_if_blocks_do_not(second: dict[str, Label], said: int) -> None:
    """The end of the first answer was rewritten before it came back."""
    assert turns((0, 9, {"session": "a"}), (8, 12, second)) == [1, said]


@pytest.mark.parametrize(("second", "said"), [({"session": "a"}, 2), ({"session": "b"}, 1), ({}, 2)])
def test_an_equal_prefix_is_not_the_same_session(second: dict[str, Label], said: int) -> None:
    """The second request starts with all of the first."""
    assert turns((0, 9, {"session": "a"}), (9, 12, second)) == [1, said]


def test_only_used_labels_are_kept() -> None:
    """Ghosts keep these labels as long as they live."""
    known: dict[str, Label] = {
        "type": "chat",
        "turn": 2,
        "session": "s",
        "session_over": True,
        "tool_pending": False,
    }
    assert labels_of(RequestHints(labels=known | {"prompt": "x" * 10_000})) == known
    assert labels_of(RequestHints(labels={"prompt": "x"})) == labels_of(None) == {}


@pytest.mark.parametrize(
    ("labels", "depth", "num_uses", "said"),
    [
        ({}, 5, 2, True),
        ({}, 5, 3, False),
        ({}, 9, 2, False),
        ({"session": "a"}, 5, 2, False),
    ],
)
def test_a_rephrased_question_supersedes_the_first(
    labels: dict[str, Label], depth: int, num_uses: int, said: bool
) -> None:
    """It diverges before the end of a second turn, behind blocks that no other request used.

    A session label is better evidence.
    """
    first, second, third = Facts({}, 0), Facts({}, 0), Facts(labels, 0)
    first.computed(5, 5)
    second.found(5, first, 60.0)
    second.computed(4, 9)
    assert third.supersedes(second, depth, num_uses) is said


def test_a_conversation_keeps_its_pauses_by_kind() -> None:
    """The typical pause weighs the conversation's own pauses, of this kind, against those of all."""
    earlier = Facts({"tool_pending": True}, 0)
    earlier.computed(4, 4)
    for pause_s in (2.0, 8.0):
        facts = Facts({"tool_pending": True}, 0)
        facts.found(earlier.end, earlier, pause_s)
        facts.computed(2, earlier.end + 2)
        earlier = facts
    own = log(2.0) + 0.3 * (log(8.0) - log(2.0))
    everyone = log(100.0)
    assert earlier.pauses.nums == (0, 2)
    assert earlier.pauses.typical(True, everyone) == pytest.approx((2 * own + 2 * everyone) / 4)
    assert earlier.pauses.typical(False, everyone) == pytest.approx(everyone)


def test_another_conversation_begins_without_pauses() -> None:
    earlier = Facts({"session": "a"}, 0)
    earlier.computed(8, 8)
    other = Facts({"session": "b"}, 0)
    other.found(8, earlier, 5.0)
    branch = Facts({}, 0)
    branch.found(4, earlier, 5.0)
    assert other.pauses.nums == branch.pauses.nums == (0, 0)
