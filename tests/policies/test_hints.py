"""Hints are checked when they are made, so that no policy meets one that it can't use in the middle of a call."""

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
        (lambda: RequestHints(priority=101), "priority=101 is not allowed: 0 to 100"),
        (lambda: RequestHints(priority=-1), "priority=-1 is not allowed"),
        (lambda: RequestHints(duration_s=0.0), r"duration_s=0\.0 is not allowed"),
        (lambda: TokenRange(4, 4, 50), r"\[4, 4\) is not allowed: 0 ≤ start < stop"),
        (lambda: TokenRange(-1, None, 50), r"\[-1, None\) is not allowed"),
        (lambda: TokenRange(0, None, 500), "priority=500 is not allowed"),
        (lambda: TokenRange("0", None, 50), r"\[0, None\) is not allowed"),  # type: ignore[arg-type]
        (lambda: TokenRange(0, 1.5, 50), r"\[0, 1\.5\) is not allowed"),  # type: ignore[arg-type]
        (lambda: RequestHints(priority="high"), "priority='high' is not allowed"),  # type: ignore[arg-type]
        (lambda: RequestHints(duration_s=float("nan")), "duration_s=nan is not allowed"),
        (lambda: RequestHints(duration_s="1"), "duration_s='1' is not allowed"),  # type: ignore[arg-type]
        (lambda: RequestHints(labels=["chat"]), "is not allowed: a mapping"),  # type: ignore[arg-type]
        (lambda: RequestHints(ranges=[TokenRange(0, 4, 50)]), "a tuple of TokenRange"),  # type: ignore[arg-type]
        (lambda: RequestHints(ranges=(4,)), r"ranges=\(4,\) is not allowed"),  # type: ignore[arg-type]
    ],
)
def test_what_no_policy_can_use_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_any_number_string_or_boolean_is_a_label() -> None:
    hints = RequestHints(labels={"session": "s", "turn": 3, "temperature": 0.5, "session_over": True})
    assert hints.labels["temperature"] == 0.5
