"""The benchmark of the disk tier runs at a small size and reports each figure of its reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.bench import tiers


@pytest.mark.slow
def test_it_measures_what_it_reports(tmp_path: Path) -> None:
    done: list[int] = []
    result = tiers.run(
        folder=tmp_path, num_records=4, num_slots=300, num_purged=40, rounds=1, progress=done.append
    )
    assert done == [1, 2] and not list(tmp_path.iterdir())
    found = result["results"]
    assert {*tiers.REACH} <= {*found}
    assert all(found[name] > 0 for name in ("write_us_per_mib", "read_us_per_mib", "open_s", "purge_s"))
    text = tiers.table(result)
    assert "write: " in text and "open 300 slots" in text and "purge 40 slots" in text
