"""A vLLM with radixkv as its cache, started and supervised: a guard process, vLLM's server, its engine.

    RADIXKV_VLLM        Python of an environment with vLLM; default: this one
    RADIXKV_VLLM_ARGS   further arguments of vLLM's server, as in a shell; they come last
    RADIXKV_VLLM_LOG    file to which vLLM's output is appended, up to 16 MiB, and then FILE.1 keeps what was there;
                        default: one that ends with this process

KV connectors are refused, also that of ``--kv-offloading-size``: purges of the service reach vLLM's cache alone, so
what a connector keeps would stay.

vLLM listens on Unix sockets alone, in a folder that only this user can enter. If it ends, it is started again after
1 s, then 2 s, up to 60 s; a minute of service resets that. The guard (``process_guard``) ends all its processes, and
removes the folder with the keys, when this process ends, however that happens.

The environment must have radixkv. If it hasn't, and this radixkv runs from a checkout, its folders go onto PYTHONPATH.
Blocks are zeroed between tenants only where radixkv is installed: vLLM finds the plug-in for that by its metadata.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from radixkv.engines.vllm import process_guard
from radixkv.engines.vllm.completion_stream import fetched
from radixkv.errors import ConfigError, ControlError
from radixkv.events.event_settings import too_long
from radixkv.signing import KeySet

READY_S: Final = 1_800.0
"""Seconds until vLLM has loaded its model."""
_GRACE_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 60.0
_TAIL_BYTES: Final = 8_000
_FOLDERS: Final = "radixkv-vllm-"
_PACKAGES: Final = ("radixkv", "radixkv_kernels", "radixkv_policies")
_CONNECTORS: Final = ("--kv-transfer-config", "--kv-offloading-size")
"""Arguments of vLLM that give it a KV connector."""
_PROBE: Final = (
    "import importlib.util as u; print(*(u.find_spec(each) is not None for each in ('vllm', 'radixkv')))"
)

log = logging.getLogger("radixkv.engines")


class VllmProcess:
    """One vLLM. ``start`` waits until it serves; ``close`` ends it.

    - ``arguments``: of vLLM's server. ``variables``: further variables of its environment.
    - ``keys``: written for it into its folder.
    - ``on_ready``: called after each start, before requests may come. Raises what a failed start is.

    Raises ConfigError.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        keys: KeySet,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._python = os.environ.get("RADIXKV_VLLM", sys.executable)
        self._arguments = [*arguments, *_given_arguments()]
        process_guard.remove_abandoned(_FOLDERS)
        self.folder, self._lock = process_guard.owned_folder(_FOLDERS)
        self.http, self.control = self.folder / "http.sock", self.folder / "control" / "control.sock"
        keys.write(self.folder / "engine.keys")
        self._environment = {
            **{name: text for name, text in os.environ.items() if not _is_ours(name)},
            "RADIXKV_KEYS": str(self.folder / "engine.keys"),
            "RADIXKV_SOCKET": str(self.control),
            "RADIXKV_ANONYMOUS": "0",
            "RADIXKV_SERVED": "1",  # the scheduler refuses connectors, also those in a file of vLLM's settings
            **variables,
        }
        self.log = Path(os.environ.get("RADIXKV_VLLM_LOG", self.folder / "vllm.log")).absolute()
        self.on_ready = on_ready
        self.problem: str | None = "vLLM is starting"
        """Why it can't serve now; None if it can."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="radixkv-vllm", daemon=True)

    def start(self) -> None:
        """Start vLLM, and wait until it serves. Raises ConfigError, with the end of its log, if it doesn't."""
        try:
            if (problem := too_long(self.http)) is not None:
                raise ConfigError("TMPDIR", tempfile.gettempdir(), "a shorter folder", problem=problem)
            self._environment |= self._paths()
            self._begin()
            problem = self._awaited()
            if problem is not None:
                raise ConfigError(
                    "RADIXKV_VLLM", self._python, "an environment in which vLLM starts", problem=problem
                )
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def close(self) -> None:
        """End vLLM, and remove its folder. May be called again."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end()
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _begin(self) -> None:
        for each in (self.http, self.control):
            each.unlink(missing_ok=True)
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(self.http)]
        guard = [sys.executable, "-P", process_guard.__file__, str(_GRACE_S), str(self.folder), str(self.log)]
        with self.log.open("ab") as output:
            self._guard = subprocess.Popen(
                [*guard, *command, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _end(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()

    def _awaited(self) -> str | None:
        """Wait until vLLM serves. Returns why it doesn't; None if it does, or if it is to stop."""
        until = time.monotonic() + READY_S
        assert self._guard is not None
        while time.monotonic() < until and not self._stopping.wait(_LOOK_EVERY_S):
            if (code := self._guard.poll()) is not None:
                return f"ended with code {code}; its log ends with:\n{self._tail()}"
            try:
                fetched(self.http, "/health")
                self.on_ready()
            except ControlError:
                continue
            self.problem = None
            return None
        return None if self._stopping.is_set() else f"isn't ready after {READY_S:g} s; its log is {self.log}"

    def _supervise(self) -> None:
        """Start vLLM again whenever it ends."""
        pause_s, began_at = 1.0, time.monotonic()
        while not self._stopping.wait(_LOOK_EVERY_S):
            guard = self._guard
            code = None if guard is None else guard.poll()
            if guard is not None and code is None and self.problem is None:
                continue
            self._end()
            pause_s = 1.0 if time.monotonic() - began_at > _LONGEST_PAUSE_S else pause_s
            self.problem = (
                f"vLLM ended with code {code}, and starts again in {pause_s:g} s; its log is {self.log}"
            )
            log.error("%s", self.problem)
            if self._stopping.wait(pause_s):
                return
            pause_s, began_at = min(2 * pause_s, _LONGEST_PAUSE_S), time.monotonic()
            self._begin()
            problem = self._awaited()
            if problem is not None:
                self.problem = f"vLLM {problem}"

    def _tail(self) -> str:
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""

    def _paths(self) -> dict[str, str]:
        """Return a PYTHONPATH with which the environment has radixkv, if it needs one. Raises ConfigError."""
        try:
            done = subprocess.run(
                [self._python, "-c", _PROBE],
                capture_output=True,
                text=True,
                timeout=60,
                env=self._environment,
                cwd=self.folder,
                check=True,
            )
            has_vllm, has_radixkv = [each == "True" for each in done.stdout.split()[-2:]]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise ConfigError("RADIXKV_VLLM", self._python, f"a Python that runs: {error}") from None
        if not has_vllm:
            raise ConfigError("RADIXKV_VLLM", self._python, "the Python of an environment with vLLM 0.32")
        if has_radixkv:
            return {}
        found = [importlib.util.find_spec(name) for name in _PACKAGES]
        roots = {str(Path(each.origin).parents[1]) for each in found if each is not None and each.origin}
        if any(root.endswith("-packages") for root in roots):
            raise ConfigError("RADIXKV_VLLM", self._python, "an environment with radixkv: install it there")
        known = self._environment.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([*sorted(roots), *([known] if known else [])])}


def _is_ours(name: str) -> bool:
    return name.startswith("RADIXKV_") and name != "RADIXKV_PURE"


def _given_arguments() -> list[str]:
    given = os.environ.get("RADIXKV_VLLM_ARGS", "")
    try:
        arguments = shlex.split(given)
    except ValueError as error:
        raise ConfigError("RADIXKV_VLLM_ARGS", given, f"arguments as in a shell: {error}") from None
    for each in arguments:
        name = each.partition("=")[0]
        if name.replace("_", "-").startswith(_CONNECTORS):
            allowed = (
                "arguments without KV connectors, because purges of this service would not reach what these keep: "
                "leave it out, or run vLLM without `radixkv serve`"
            )
            raise ConfigError("RADIXKV_VLLM_ARGS", f"…{name}…", allowed)
    return arguments
