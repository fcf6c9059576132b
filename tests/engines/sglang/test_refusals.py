"""What radixkv can't serve in SGLang is refused at the start, by name. Ids of 33 bits: ``test_cache``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.sglang.runs import answer_of

pytestmark = [pytest.mark.engines]

NAMES = {
    "bigram keys": "EAGLE's bigram keys",
    "sliding window": "a sliding window",
    "hybrid sliding window": "a sliding window",
    "Mamba": "a model with a state",
    "hierarchical cache": "a hierarchical cache",
    "pipeline": "pipeline parallel ranks",
    "context parallel": "context parallel ranks",
    "data parallel attention": "attention in data parallel ranks",
    "policy configuration": "an eviction policy's configuration",
    "unknown policy": "clock",
    "unknown version": "0.5.24",
}


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return answer_of("refusals.py", "", None)


def test_every_case_is_known(answer: dict[str, Any]) -> None:
    assert answer.keys() == {"nothing", *NAMES} and answer["nothing"] is None


@pytest.mark.parametrize("case", NAMES)
def test_it_is_refused_by_name(answer: dict[str, Any], case: str) -> None:
    assert answer[case] is not None and NAMES[case] in answer[case]
    if case != "unknown policy":
        assert "RADIXKV_OFF=1 uses SGLang's own cache" in answer[case]
