"""Hints are checked when they are made, so no policy gets an unusable one in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv_policies import RequestHints, TokenRange


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RequestHints(labels={"type": ["chat"]}), r"label 'type': \['chat'\] is not allowed"),
        (lambda: RequestHints(labels={"turn": None}), "label 'turn': None is not allowed"),
        (lambda: RequestHints(labels={1: "chat"}), "label 1: 'chat' is not allowed"),
        (lambda: RequestHints(priority=101), "priority=101 is not allowed; allowed: 0 to 100"),
        (lambda: RequestHints(priority=-1), "priority=-1 is not allowed"),
        (lambda: RequestHints(duration_s=0.0), r"duration_s=0\.0 is not allowed"),
        (lambda: TokenRange(4, 4, 50), r"\[4, 4\) is not allowed; allowed: 0 ≤ start < stop"),
        (lambda: TokenRange(-1, None, 50), r"\[-1, None\) is not allowed"),
        (lambda: TokenRange(0, None, 500), "priority=500 is not allowed"),
        (
            lambda: RequestHints(priority=50.0),
            r"priority=50\.0 is not allowed; allowed: 0 to 100, an integer",
        ),
        (lambda: RequestHints(priority=True), "priority=True is not allowed"),
        (lambda: RequestHints(priority="high"), "priority='high' is not allowed"),
        (lambda: RequestHints(duration_s="1"), "duration_s='1' is not allowed; allowed: seconds > 0"),
        (lambda: RequestHints(duration_s=float("nan")), "duration_s=nan is not allowed"),
        (
            lambda: RequestHints(duration_s=10**400),
            r"duration_s=1000.*000 is not allowed; allowed: .* at most 1e\+12",
        ),
        (
            lambda: RequestHints(labels=[("type", "chat")]),
            r"labels=\[.*\] is not allowed; allowed: a mapping",
        ),
        (lambda: RequestHints(labels=None), "labels=None is not allowed"),
        (lambda: RequestHints(ranges=((0, 4, 5),)), "is not allowed; allowed: a tuple of TokenRange"),
        (lambda: RequestHints(ranges=TokenRange(0, 4, 5)), "is not allowed; allowed: a tuple of TokenRange"),
        (lambda: TokenRange(0, 4, None), "priority=None is not allowed"),
        (lambda: TokenRange(0.5, 4, 50), r"\[0\.5, 4\) is not allowed; allowed: 0 ≤ start < stop, integers"),
        (lambda: TokenRange(0, "4", 50), r"\[0, '4'\) is not allowed"),
        (lambda: TokenRange(0, 0, 50), r"\[0, 0\) is not allowed"),
    ],
)
def test_unusable_hints_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_any_number_string_or_boolean_is_a_label() -> None:
    hints = RequestHints(labels={"session": "s", "turn": 3, "temperature": 0.5, "session_over": True})
    assert hints.labels["temperature"] == 0.5
