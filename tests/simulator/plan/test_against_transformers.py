"""Parameters beside those that transformers makes of the same config, on the meta device: no memory, no weights."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.simulator.plan.models import PUBLISHED, published

pytestmark = pytest.mark.slow

KNOWN = [
    name
    for name, each in PUBLISHED.items()
    if each["config"]["model_type"] in CONFIG_MAPPING and each["config"]["model_type"] != "kimi_linear"
]
"""Those of transformers' own types. It names the fields of Kimi Linear otherwise than the model's config."""


def _made(config: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        made: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return made


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_that_transformers_makes(name: str) -> None:
    """The difference is what neither runs nor loads: masks and corrections of routers, which one counts as weights."""
    config = {key: each for key, each in PUBLISHED[name]["config"].items() if key != "torch_dtype"}
    made = _made(config)
    counted = sum(each.numel() for each in made.parameters())
    assert published(name).num_parameters == pytest.approx(counted, rel=1e-4)
