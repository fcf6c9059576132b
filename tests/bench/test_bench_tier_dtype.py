"""``radixkv bench tier-dtype``: exact KV change nothing, lossy ones little, and errors that are planted show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that needs no reading of the whole standard library, and a fortieth of the tokens of a training step."""
    from radixkv.bench import trained_model

    monkeypatch.setattr(trained_model, "ROWS", 2)
    monkeypatch.setattr(trained_model, "LENGTH", 32)
    line = b"The quick brown fox jumps over the lazy dog; then it reads what it wrote, and writes it again.\n"
    monkeypatch.setattr(trained_model, "text", lambda: line * 500)


def measured(**settings: Any) -> dict[str, dict[str, Any]]:
    from radixkv.bench import tier_dtype

    result = tier_dtype.run(**{"steps": 2, "prompts": 2, "tokens": 100, **settings})
    assert json.loads(json.dumps(result)) == result
    text = tier_dtype.table(result)
    assert all(row["dtype"] in text for row in result["results"])
    return {row["dtype"]: row for row in result["results"]}


@pytest.mark.slow
def test_exact_is_the_control(short_text: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured()
    assert rows["exact"]["max_logit"] == rows["exact"]["kl"] == 0.0 and rows["exact"]["same_choice"] == 1.0
    for dtype in ("fp8", "int8"):
        row = rows[dtype]
        assert 0 < row["mean_logit"] < row["max_logit"] < 1 and 0 < row["kl"] < 0.01
        assert abs(row["loss"] - rows["exact"]["loss"]) < 0.05
        assert row["bytes_per_token"] == 3 * 2 * 2 * (64 + 4) and row["of_16_bits"] == 68 / 128
    assert rows["int8"]["mean_logit"] < rows["fp8"]["mean_logit"]
    from radixkv.storage.lossy_codec import LossyCodec

    original = LossyCodec.decode
    monkeypatch.setattr(
        LossyCodec, "decode", lambda self, records: [2 * each for each in original(self, records)]
    )
    worse = measured()
    assert worse["exact"]["max_logit"] == 0.0
    assert worse["int8"]["mean_logit"] > 10 * rows["int8"]["mean_logit"], "a wrong scale shows"


@pytest.mark.slow
def test_training_learns_and_is_reproducible(short_text: None) -> None:
    import torch

    from radixkv.bench import trained_model

    one, other, longer = (trained_model.trained(steps, 300, seed=3) for steps in (3, 3, 30))
    assert one.loss == other.loss > longer.loss
    same = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(mine, its) for mine, its in same)
    assert len(one.held_out) in range(9_500, 9_700)


def test_a_model_of_ones_own_needs_its_tokenizer(tmp_path: Path, short_text: None) -> None:
    from radixkv.bench import tier_dtype
    from radixkv.engines.hf_models import demo_model

    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}
    demo_model(7, 64, **shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        tier_dtype.run(model=tmp_path)
    with pytest.raises(ConfigError, match="model"):
        tier_dtype.run(model=tmp_path / "nothing")


def test_more_prompts_than_text_are_refused(short_text: None) -> None:
    from radixkv.bench import tier_dtype

    with pytest.raises(ConfigError, match="prompts"):
        tier_dtype.run(steps=1, prompts=1_000)
