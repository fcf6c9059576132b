"""Each behaviour of SGLang's prefix cache that its scheduler relies on: SGLang's own and radixkv's, side by side."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.sglang.runs import answer_of

pytestmark = [pytest.mark.engines]

OTHERWISE = {
    # Keys are uint32: larger ids find nothing and leave nothing.
    *(f"ids_above_32_bits/{page}" for page in (1, 2, 4, 16)),
    # A page has one id: slots of several pages in one page of a prompt don't exist in SGLang's pools.
    *(f"slots_scattered_over_pages/{page}" for page in (2, 4, 16)),
    # EAGLE's keys: refused at the start.
    "bigram_keys/1",
}
"""Cases that radixkv answers otherwise than SGLang's own cache."""


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return answer_of("scenarios.py", "", None)


def test_sglangs_own_cache_passes_every_scenario(answer: dict[str, Any]) -> None:
    failed = {case: error for case, error in answer["found"]["stock"].items() if error is not None}
    assert not failed and len(answer["found"]["stock"]) == 240


def test_radixkv_passes_all_but_the_named_ones(answer: dict[str, Any]) -> None:
    failed = {case: error for case, error in answer["found"]["radixkv"].items() if error is not None}
    assert failed.keys() == OTHERWISE, [error for case, error in failed.items() if case not in OTHERWISE]


def test_hashes_in_events_equal_sglangs_own(answer: dict[str, Any]) -> None:
    stock, ours = answer["hashes"]["stock"], answer["hashes"]["radixkv"]
    assert ours == stock and sum(map(len, stock.values())) > 60
