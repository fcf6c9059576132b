"""One replica in a process of its own: a real cache and a real coordinator. Only the KV is simulated.

Each block has a tag: its content, and when it was computed. A request checks the tags of its cached blocks, as an
engine reads their KV. It writes the tags of the blocks that it computes. Events are written to a history, one JSON
object per line. Times are those of the machine's monotonic clock, which all processes share.

Commands come over a pipe as ``(number, name, arguments)``. The answer is ``(number, value)``. A second thread runs the
commands that may wait for Redis, one after the other. It repeats them until Redis answers.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.coordination import Load, Settings
from radixkv.coordination.purges import Purge
from radixkv.coordination.redis_coordinator import RedisCoordinator
from radixkv.coordination.store.wire import Raised
from radixkv.errors import (
    CoordinationError,
    OutOfBlocks,
    RadixKVError,
    StaleEpoch,
    StaleGeneration,
    StoreUnavailable,
)

SECRET: Final = b"the secret of a fleet under attack"
MODEL: Final = "fp:model"
LEASE_S: Final = 1.5
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 384
TENANTS: Final = ("serves", "refuses")
"""How each wants a replica to act that can't know whether the tenant was purged."""
NUM_PROMPTS: Final = 10
RETRY_S: Final = 0.1


def namespace(tenant: str) -> Namespace:
    """Return the one namespace of a tenant."""
    return Namespace(tenant, MODEL)


def prompts(seed: int) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
    """Return prompts of 1 to 5 segments. Half of them begin alike."""
    chance = np.random.default_rng(seed)
    common = chance.integers(0, 32_000, 512, dtype=np.uint32)
    found = []
    for number in range(NUM_PROMPTS):
        own = chance.integers(0, 32_000, int(chance.integers(300, 1_000)), dtype=np.uint32)
        found.append(np.concatenate([common, own]) if number % 2 else own)
    return found


class History:
    """Lines of JSON. Each is written at once, so a process that is killed leaves all lines before."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def record(self, event: str, **facts: Any) -> None:
        """Write one line."""
        self._file.write(json.dumps({"t": time.monotonic(), "event": event, **facts}) + "\n")


class Worker:
    """The replica of this process. See the module's docstring."""

    def __init__(self, pipe: Connection, url: str, name: str, path: Path, seed: int) -> None:
        self.pipe, self.name, self.prompts = pipe, name, prompts(seed)
        self.history = History(path)
        self.offset_s = 0.0
        self.tags: dict[int, tuple[bytes, float]] = {}
        self.serving = threading.Lock()
        self.replying = threading.Lock()
        self.waiting: queue.SimpleQueue[tuple[int, str, list[Any]]] = queue.SimpleQueue()
        settings = Settings(
            name, SECRET, MODEL, BLOCK_SIZE, f"http://{name}", LEASE_S, queue_records=200, snapshot_entries=20
        )
        self.coordinator = RedisCoordinator(settings, url, self.clock)
        config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.cache = PrefixCache(config, journal=self.coordinator.journal)
        self.coordinator.attach(self.cache, self.purged)
        self.coordinator.purges.meet(TENANTS)

    def clock(self) -> float:
        """Return monotonic seconds plus the offset that the schedule has set."""
        return time.monotonic() + self.offset_s

    def run(self) -> None:
        """Execute commands until the pipe is closed."""
        threading.Thread(target=self.run_waiting, daemon=True).start()
        self.waiting.put((0, "register", []))
        while True:
            try:
                number, name, arguments = self.pipe.recv()
            except (EOFError, OSError):
                return
            if name in ("serve", "stacks", "state", "turn"):
                self.reply(number, getattr(self, name)(*arguments))
            else:
                self.waiting.put((number, name, arguments))

    def reply(self, number: int, value: Any) -> None:
        """Send the answer to a command."""
        with self.replying:
            self.pipe.send((number, value))

    def run_waiting(self) -> None:
        """Run the commands that may wait for Redis."""
        while True:
            number, name, arguments = self.waiting.get()
            self.reply(number, self.with_retries(name, getattr(self, name), arguments))

    def with_retries(self, name: str, act: Callable[..., Any], arguments: list[Any]) -> Any:
        """Run a command, and repeat it while Redis is unavailable. Return the name of any other error."""
        while True:
            try:
                return act(*arguments)
            except StoreUnavailable:
                time.sleep(RETRY_S)
            except StaleEpoch:
                return "fenced"
            except (CoordinationError, RadixKVError) as error:
                self.history.record("refused", name=name, error=repr(error))
                return type(error).__name__

    # ---- commands without the store

    def serve(self, tenant: str, number: int) -> str | int:
        """Serve a request. Return the number of cached tokens of the prompt, or the reason why it wasn't served."""
        began, epoch = time.monotonic(), self.coordinator.info().epoch
        knew = self.coordinator.knows_generations
        if tenant == "refuses" and not knew:
            return "refused"
        ids = self.prompts[number]
        try:
            with (
                self.serving,
                nullcontext(time.monotonic()) as opened_at,  # a purge may have come since the request began
                self.cache.open(namespace(tenant), ids) as sequence,
            ):
                num_cached = sequence.num_cached_tokens
                blocks = sequence.block_table.tolist()
                wanted = self.contents(tenant, ids)
                oldest, wrong = began, 0
                for at in range(num_cached // BLOCK_SIZE):
                    content, written_at = self.tags.get(blocks[at], (b"", began))
                    oldest, wrong = min(oldest, written_at), wrong + (content != wanted[at])
                for at in range(num_cached // BLOCK_SIZE, len(wanted)):
                    self.tags[blocks[at]] = wanted[at], opened_at
                sequence.commit(len(ids))
        except OutOfBlocks:
            return "full"
        except StaleGeneration:  # it was purged between the two
            return "purged"
        facts = {"cached": num_cached, "oldest": oldest, "wrong": wrong}
        self.history.record("served", tenant=tenant, began=began, epoch=epoch, knew=knew, **facts)
        return num_cached

    def contents(self, tenant: str, ids: np.ndarray[Any, np.dtype[np.uint32]]) -> list[bytes]:
        """Return the expected content of each whole block of a prompt."""
        digest = sha256(tenant.encode())
        found = []
        for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
            digest.update(ids[end - BLOCK_SIZE : end].tobytes())
            found.append(digest.digest()[:8])
        return found

    def purged(self, tenant: str, raised: Raised) -> None:
        """Purge a tenant, as the fleet asks."""
        self.cache.purge(tenant)
        self.history.record("purged", tenant=tenant, generation=raised.generation)

    def turn(self, seconds: float) -> None:
        """Change the clock of this replica by ``seconds``."""
        self.offset_s += seconds

    def stacks(self) -> str:
        """Return the stack of each thread."""
        names = {each.ident: each.name for each in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(thread)}\n{''.join(traceback.format_stack(frame))}"
            for thread, frame in sys._current_frames().items()
        )

    def state(self, with_hints: bool) -> dict[str, Any]:
        """Return the replica's state. ``with_hints`` adds the tokens that it holds, and its view of the others."""
        health = self.coordinator.health()
        found: dict[str, Any] = {
            "state": health.state,
            "reason": health.reason,
            "epoch": health.epoch,
            "live": self.coordinator.info().live,
            "queued": health.num_queued,
            "peers": [peer.id for peer in self.coordinator.peers()],
            "generations": {tenant: self.coordinator.purges.generation(tenant) for tenant in TENANTS},
            "granted": {name: grant.blocks for name, grant in self.coordinator.quotas._grants.items()},
            "limits": self.coordinator.limits(),
        }
        if with_hints:
            asked = [(tenant, number) for tenant in TENANTS for number in range(NUM_PROMPTS)]
            found["held"] = {
                at: self.cache.match(namespace(at[0]), self.prompts[at[1]]).num_tokens // 256 * 256
                for at in asked
            }
            found["hints"] = {at: self.hints(*at) for at in asked}
        return found

    def hints(self, tenant: str, number: int) -> dict[str, int]:
        """Return the number of tokens that each other replica holds, in this replica's view."""
        found = self.coordinator.hints(namespace(tenant), self.prompts[number])
        return {hint.replica.id: hint.num_tokens for hint in found}

    # ---- commands that may wait for Redis

    def register(self) -> int:
        """Take the id."""
        info = self.coordinator.register()
        self.coordinator.report_load(Load(resident_blocks=self.cache.stats().resident_blocks))
        self.history.record("registered", name=self.name, epoch=info.epoch)
        return info.epoch

    def purge(self, tenant: str) -> dict[str, Any]:
        """Purge a tenant in the whole fleet."""
        self.cache.purge(tenant)
        return self.purge_state(tenant, self.coordinator.purge(tenant))

    def purge_report(self, tenant: str) -> dict[str, Any]:
        """Return the progress of the last purge."""
        return self.purge_state(tenant, self.coordinator.purge_report(tenant))

    def purge_state(self, tenant: str, found: Purge) -> dict[str, Any]:
        """Return whether a purge is complete, and the epochs of the replicas that have confirmed it."""
        store = self.coordinator.store
        said = store.tenant(self.coordinator.keys.tenant(tenant)).confirmed
        nonces = {name: each.nonce for name, each in said.items()}
        registered = [each.registration for each in store.fetch(found.confirmed).seen]
        confirmed = {
            each.replica_id: each.epoch for each in registered if nonces.get(each.replica_id) == each.nonce
        }
        return {"complete": found.is_complete, "confirmed": confirmed}

    def limit(self, tenant: str, blocks: int) -> bool:
        """Set a tenant's limit in the whole fleet."""
        self.coordinator.set_limit(tenant, blocks)
        return True

    def reserve(self, tenant: str, blocks: int) -> int:
        """Reserve a share of the limit."""
        return self.coordinator.reserve(tenant, blocks).blocks

    def job(self, job_id: str, tenant: str) -> dict[str, Any] | None:
        """Return the state of a warm job."""
        job = self.coordinator.job(job_id, tenant)
        if job is None:
            return None
        return {
            "ended": job.is_ended,
            "parts": [(p.replica_id, p.state) for p in job.parts],
        }

    def begin_job(self, job_id: str, tenant: str, names: list[str]) -> bool:
        """Ask these replicas to warm a prefix."""
        job = self.coordinator.create_job(namespace(tenant), 256, names, job_id=job_id)
        return job.id == job_id

    def do_job(self, job_id: str, tenant: str, number: int) -> bool:
        """Execute this replica's part of a job."""
        self.coordinator.report_job(job_id, "running", 0)
        self.serve(tenant, number)
        return self.coordinator.report_job(job_id, "done", 256)

    def take_job(self, job_id: str, tenant: str, helper: str) -> bool:
        """Take over a job whose owner is gone. If a replica is missing, ask ``helper`` too."""
        job = self.coordinator.take_job(job_id, tenant)
        if job is None:
            return False
        if job.num_missing:
            self.coordinator.extend_job(job_id, helper)
        return True


def main(pipe: Connection, url: str, name: str, path: str, seed: int) -> None:
    """Run the process of a replica."""
    worker = Worker(pipe, url, name, Path(path), seed)
    try:
        worker.run()
    except BaseException as error:
        worker.history.record("crashed", error=repr(error))
        raise
