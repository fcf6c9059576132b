"""A disk below lossy host memory: its records are of one dtype, and a folder with others begins anew."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from radixkv import CacheConfig, Namespace
from radixkv.audit.oracle import Engine
from radixkv.cli import main as cli
from radixkv.errors import ConfigError
from radixkv.files.private_folder import OLD_DISKS, PrivateFolder
from radixkv.tiers.disk import inspection
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.tiers.test_loading import SECRET, DiskOwner
from tests.tiers.test_tier_dtype import LAYOUT, WITHIN, LossyOwner
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, SIZE, loading_of
from tests.waiting import eventually

pytestmark = pytest.mark.slow


class LossyDiskOwner(LossyOwner, DiskOwner):
    """An engine of one's own, with a disk whose records are of one dtype."""

    def __init__(self, folder: Path, dtype: Any = "int8", num_blocks: int = 40) -> None:
        self.cache = TieredCache(
            CacheConfig(num_blocks, SIZE, LAYOUT, host_blocks=64, tier_dtype=dtype),
            disk=DiskOptions(folder, 4 << 20, SECRET, files=FaultyFiles()),
            fingerprint="toy",
        )
        self.engine = Engine(self.cache)
        self.error = 0.0 if dtype == "exact" else WITHIN

    @property
    def on_disk(self) -> int:
        return int(self.cache.tier_counts()["disk"]["resident_blocks"])

    def loaded(self, namespace: Namespace) -> int:
        """Open the prompt, and return how many of its tokens come back. They are right."""
        with self.cache.open(namespace, PROMPT) as sequence:
            if sequence.loading is None:
                return 0
            assert loading_of(sequence).wait() and self.is_right(sequence)
            return sequence.num_committed_tokens


@contextmanager
def on_disk(folder: Path, dtype: Any = "int8") -> Iterator[LossyDiskOwner]:
    owner = LossyDiskOwner(folder, dtype)
    with closing(owner.cache):
        yield owner


def fill(folder: Path, dtype: Any) -> Path:
    """Keep the KV of the prompt in a folder, of two tenants."""
    with on_disk(folder, dtype) as owner:
        for namespace in (NS, OTHER):
            owner.ask(PROMPT, namespace)
        assert eventually(lambda: owner.on_disk == 20)
    return folder


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_restart_finds_what_was_kept(tmp_path: Path, dtype: str) -> None:
    with on_disk(fill(tmp_path / "disk", dtype), dtype) as owner:
        assert owner.loaded(NS) == owner.loaded(OTHER) == 40
        assert not owner.is_exact(PROMPT, NS)
        assert owner.cache.tier_counts()["disk"]["hit_blocks"] == 20
        first = owner.engine.read(owner.cache.match(NS, PROMPT).block_ids).copy()
        owner.evict()
        assert owner.ask(PROMPT) == (40, 1), "host memory has it again"
        assert (owner.engine.read(owner.cache.match(NS, PROMPT).block_ids) == first).all()


@pytest.mark.parametrize(
    ("before", "after"), [("int8", "fp8"), ("fp8", "int8"), ("int8", "exact"), ("exact", "fp8")]
)
def test_a_folder_of_another_dtype_begins_anew(tmp_path: Path, before: str, after: str) -> None:
    """Those of fp8 and int8 have the same size. The old ones are never read, also by the dtype that they have."""
    folder = fill(tmp_path / "disk", before)
    assert inspection.num_dropped(folder, [SECRET], 4 << 20, after) > 20, "`radixkv config check` warns"
    assert not inspection.num_dropped(folder, [SECRET], 4 << 20, before)
    slab = (folder / "slab").read_bytes()
    old = [page for at in range(4096, len(slab), 4096) if any(page := slab[at : at + 4096])]
    with on_disk(folder, after) as owner:
        assert owner.on_disk == 0 and owner.loaded(NS) == owner.loaded(OTHER) == 0
        assert owner.cache.tier_counts()["disk"]["hit_blocks"] == 0
        owner.ask(PROMPT)
        assert eventually(lambda: owner.on_disk == 10), "no old record is in the way"
    slab = (folder / "slab").read_bytes()
    assert old and not any(each in slab for each in old), "nothing of them is left"
    with on_disk(folder, before) as owner:
        assert owner.on_disk == 0 and owner.loaded(NS) == owner.loaded(OTHER) == 0


@pytest.mark.parametrize("forget", ["purge", "clear"])
def test_what_was_forgotten_does_not_come_back(tmp_path: Path, forget: str) -> None:
    folder = fill(tmp_path / "disk", "int8")
    with on_disk(folder) as owner:
        owner.cache.purge("a") if forget == "purge" else owner.cache.clear(NS)
        assert owner.loaded(NS) == 0
        assert eventually(lambda: not owner.cache.pending("a"))
    with on_disk(folder) as owner:
        assert (owner.loaded(NS), owner.loaded(OTHER)) == (0, 40), "also after a restart"


@pytest.mark.parametrize("call", ["announce", "prefetch"])
def test_a_prompt_comes_ahead(tmp_path: Path, call: str) -> None:
    with on_disk(fill(tmp_path / "disk", "int8")) as owner:
        getattr(owner.cache, call)(NS, PROMPT)
        assert eventually(lambda: owner.below.host.cache.match(NS, PROMPT).num_tokens == 40)
        assert owner.ask(PROMPT) == (40, 1)


def test_a_disk_needs_host_memory(tmp_path: Path) -> None:
    disk = DiskOptions(tmp_path / "disk", 4 << 20, SECRET)
    with pytest.raises(ConfigError, match="none without host_blocks"):
        TieredCache(CacheConfig(16, SIZE, LAYOUT), disk=disk, fingerprint="toy")
    assert not (tmp_path / "disk").exists()


# --- folders of earlier versions, with a disk for each dtype


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder as an earlier version left it: a lock, and a disk tier's folder for each lossy dtype."""
    folder = tmp_path / "old"
    PrivateFolder(folder, contents=OLD_DISKS).close()
    for dtype in ("fp8", "int8"):
        fill(folder / dtype, dtype)
    return folder


def reset(folder: Path) -> Any:
    return CliRunner().invoke(cli.commands, ["disk", "reset", str(folder), "--yes"])


def test_an_old_folder_is_refused_by_name_until_it_is_emptied(old: Path) -> None:
    files = sorted(old.rglob("*"))
    told = rf"disk='{old}' is not allowed; allowed: the folder of one disk tier.*`radixkv disk reset {old}`"
    for dtype in ("exact", "int8"):
        with pytest.raises(ConfigError, match=told):
            LossyDiskOwner(old, dtype)
    for command in ("check", "repair"):
        secret = old.parent / "secret"
        secret.write_bytes(SECRET)
        found = CliRunner().invoke(cli.commands, ["disk", command, str(old), "--fleet-secret", str(secret)])
        assert "`radixkv disk reset" in str(found.exception)
    assert sorted(old.rglob("*")) == files
    run = reset(old)
    assert run.exit_code == 0, run.output
    assert all(
        f"{dtype}/{name}" in run.output for dtype in ("fp8", "int8") for name in ("master", "slab", "keys/")
    )
    assert [each.name for each in old.iterdir()] == ["lock"], "all of it was destroyed"
    with on_disk(old) as owner:
        owner.ask(PROMPT)
        assert eventually(lambda: owner.on_disk == 10)
    with on_disk(old) as owner:
        assert owner.loaded(NS) == 40


def test_the_old_disk_of_one_dtype_may_go_on(old: Path) -> None:
    with on_disk(old / "int8") as owner:
        assert owner.loaded(NS) == owner.loaded(OTHER) == 40


def test_a_reset_that_was_interrupted_is_repeated(old: Path) -> None:
    """Also after every step of one folder's removal."""
    inspection.forget(old / "int8")
    shutil.rmtree(old / "fp8" / "keys")
    (old / "int8" / "lock").unlink()
    for each in (old / "int8").iterdir():
        shutil.rmtree(each)
    assert inspection.contents(old)
    inspection.forget(old)
    assert [each.name for each in old.iterdir()] == ["lock"]


def test_what_cannot_be_destroyed_keeps_nothing_else(old: Path) -> None:
    files, failed = FaultyFiles(), list[str]()

    def fail(call: str) -> None:
        if call == "remove" and not failed:
            failed.append(call)
            raise OSError(5, "Input/output error")

    files.before = fail
    with pytest.raises(OSError, match="Input/output"):
        inspection.forget(old, files=files)
    assert not (old / "int8").exists() and (old / "fp8").exists()
    inspection.forget(old)
    assert not (old / "fp8").exists()


def test_an_old_folder_in_use_or_with_other_files_is_left_alone(old: Path) -> None:
    with closing(PrivateFolder(old / "int8")):
        assert "no other process uses" in str(reset(old).exception)
    (old / "int8" / "notes.txt").touch()
    assert "it has 'notes.txt'" in str(reset(old).exception)
    assert (old / "int8" / "master").exists() and (old / "fp8" / "master").exists()
    (old / "int8" / "notes.txt").rename(old / "notes.txt")
    assert "it has 'notes.txt'" in str(reset(old).exception)
    (old / "notes.txt").unlink()
    (old / "lock").unlink()
    assert "'lock'" in str(reset(old).exception) or "it has 'fp8'" in str(reset(old).exception)
    assert (old / "int8" / "master").exists() and (old / "fp8" / "master").exists()
