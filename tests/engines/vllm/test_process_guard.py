"""The guard of an engine's process: it leaves no process, no folder of keys, and no endless log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from radixkv.engines.vllm import process_guard
from radixkv.engines.vllm.process_guard import LOG_BYTES, owned_folder, remove_abandoned
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.slow

TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def guarded(folder: Path, program: str, owned: Path | None = None) -> subprocess.Popen[bytes]:
    """Run a program under a guard, with ``log`` in the folder. ``owned``: the folder that goes with its owner."""
    keys = folder / "none" if owned is None else owned
    command = [sys.executable, "-P", process_guard.__file__, "0.5", str(keys), str(folder / "log")]
    return subprocess.Popen([*command, sys.executable, "-c", program], stdin=subprocess.PIPE)


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("end", ["stdin ends", "the guard is killed", "its child is killed"])
def test_the_guard_leaves_no_process(tmp_path: Path, end: str) -> None:
    with guarded(tmp_path, TREE) as guard:
        assert guard.stdin is not None
        log = tmp_path / "log"
        eventually(lambda: log.exists() and log.read_text().endswith("\n"), "the command has begun")
        first, second = map(int, log.read_text().split())
        if end == "stdin ends":
            guard.stdin.close()
        elif end == "the guard is killed":
            guard.kill()
        else:
            os.kill(first, signal.SIGKILL)
        guard.wait(LIMIT_S)
        left = [first] if end == "the guard is killed" else [first, second]
        eventually(lambda: not any(map(_is_alive, left)), "the processes end")
        if _is_alive(second):  # the kernel kills the command itself; vLLM's engine then ends by its own watch
            os.kill(second, signal.SIGKILL)


def test_the_guard_exits_as_its_command(tmp_path: Path) -> None:
    with guarded(tmp_path, "print('so long'); raise SystemExit(7)") as guard:
        assert guard.wait(LIMIT_S) == 7
    assert (tmp_path / "log").read_text() == "so long\n"


def test_a_log_keeps_the_end_of_the_output(tmp_path: Path) -> None:
    """The command is never stopped by a full log, and what it says last is there."""
    log, lines = tmp_path / "log", 2 * LOG_BYTES // 1024 + 9_000
    log.write_text("from before\n")
    with guarded(
        tmp_path, f"for at in range({lines}): print(str(at).rjust(1023))\nraise SystemExit(3)"
    ) as guard:
        assert guard.wait(LIMIT_S) == 3
    old = tmp_path / "log.1"
    assert max(log.stat().st_size, old.stat().st_size) <= LOG_BYTES
    kept = (old.read_text() + log.read_text()).split()
    assert [int(each) for each in kept] == list(range(lines - len(kept), lines))
    assert len(kept) > LOG_BYTES // 1024
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    with guarded(tmp_path, "print('x' * 1_000_000)") as guard:
        assert guard.wait(LIMIT_S) == 0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_goes_with_its_owner(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, lock = owned_folder("keys-")
    assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
    (folder / "engine.keys").write_text("secret")
    place = tmp_path_factory.mktemp("log")
    with guarded(place, "pass", folder) as guard:
        assert guard.wait(LIMIT_S) == 0
    remove_abandoned("keys-")
    assert (folder / "engine.keys").exists(), "it was removed while its owner lives"
    os.close(lock)
    with guarded(place, "pass", folder) as guard:
        assert guard.wait(LIMIT_S) == 0
    assert not folder.exists()


def test_only_abandoned_folders_of_ours_are_removed(temporary: Path) -> None:
    owner = (
        "import os, signal, sys, tempfile; from radixkv.engines.vllm.process_guard import owned_folder; "
        "tempfile.tempdir = sys.argv[1]; folder, _ = owned_folder('keys-'); (folder / 'k').touch(); "
        "print(folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", owner, str(temporary)], capture_output=True, text=True, check=False
    )
    left = Path(done.stdout.strip())
    assert done.returncode == -signal.SIGKILL and (left / "k").exists()
    mine, lock = owned_folder("keys-")
    shared, other, file, link = (
        temporary / name for name in ("keys-shared", "other-1", "keys-file", "keys-link")
    )
    shared.mkdir(mode=0o755)
    other.mkdir(mode=0o700)
    file.touch()
    link.symlink_to(other)
    remove_abandoned("keys-")
    assert not left.exists()
    assert all(each.exists() for each in (mine, shared, other, file)) and link.is_symlink()
    os.close(lock)
