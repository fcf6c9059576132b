"""The comparison with LMCache: radixkv's side stores and loads, and a side that fails says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from radixkv.bench import beside_lmcache


@pytest.mark.slow
def test_our_side_has_all_figures(tmp_path: Path) -> None:
    found = beside_lmcache.measure("radixkv", sys.executable, 64, tmp_path)
    assert tuple(found) == beside_lmcache.FIGURES
    assert all(wall > 0 and cpu > 0 for wall, cpu in found.values())
    assert not list(tmp_path.iterdir())


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named lmcache' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"lmcache, by .*/python: No module named lmcache"):
        beside_lmcache.measure("lmcache", str(python), 64, tmp_path)
