"""Processes that read bodies, and the lanes before them. They do the work that holds the interpreter's lock for long.

    read ─▶ lane of its tenant ─(turn by turn)─▶ a process ─▶ answer

Each tenant has a lane, bounded in number and bytes: beyond that it gets Busy, whatever others do. Lanes are served in
turn. So a tenant waits behind at most one body of each other tenant, however many those have waiting. If a client hangs
up, its body leaves the lane; a body that is being read is read to its end, and dropped.

A process starts with its first body (0.5 s of a core, 60 MB) and ends with the service. It is replaced when it dies or
takes longer than MAX_READING_S; then only its present body fails. The event loop only moves bytes: a message is the
lengths of its two parts (HEAD), and the parts. Of an answer the second one is empty.

A thread would stop the loop, because whatever makes Python's objects holds the interpreter's lock until it is done. Of
4 MiB, that is 16 to 70 ms for msgspec, the fastest parser, 30 to 50 for pydantic's, and 110 to count the values of a
chat. tokenizers holds it for 350 ms for one text of 516,000 characters. And a thread can't be ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass

from radixkv.clock import Clock, monotonic
from radixkv.service import problems
from radixkv.service.engine_loop import Busy, Closed
from radixkv.service.prompts import PromptRules

MAX_READING_S = 60.0
"""A process that takes longer for one body, its own start included, is ended."""
MAX_WAITING = 256
MAX_WAITING_BYTES = 64 * 2**20
"""Most bytes in a lane. A longer body is accepted by an empty lane."""
HEAD = struct.Struct("<QQ")
_RESTART_AFTER_S = 1.0
_CODE = "import sys; from radixkv.service.reading_process import main; main(int(sys.argv[1]), sys.argv[2])"

log = logging.getLogger("radixkv.service")


@dataclass(frozen=True, slots=True)
class Specification:
    """The arguments of a process: the tokenizer's path, its digest, and the rules for prompts."""

    tokenizer: str | None
    digest: str
    rules: PromptRules

    def document(self, niceness: int) -> str:
        """Return the specification as an argument of the process."""
        return json.dumps({**asdict(self), "niceness": niceness})


class Died(Exception):
    """A process ended, or was ended, before it answered."""


class ReadingProcess:
    """One process, started at its first call. It takes one call at a time, on one event loop."""

    def __init__(self, specification: Specification, niceness: int = 0, clock: Clock = monotonic) -> None:
        self._argument, self._clock = specification.document(niceness), clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._started_at = float("-inf")

    @property
    def pid(self) -> int | None:
        """The id of the process if it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, unless it runs. Raises Died if it was just started, and died."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        if self._clock() < self._started_at + _RESTART_AFTER_S:
            raise Died
        self._started_at = self._clock()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self._socket = ours
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, str(theirs.fileno()), self._argument],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )

    def stop(self) -> None:
        """End it now. Takes a few milliseconds."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    async def ask(self, parts: tuple[bytes, bytes]) -> bytearray:
        """Return the answer to a message. Raises Died; then the process was ended, and the next call starts another."""
        try:
            async with asyncio.timeout(MAX_READING_S):
                self.start()
                return await self._answer(parts)
        except (OSError, EOFError, TimeoutError) as error:
            log.error("a process that reads bodies ended unexpectedly: %s", type(error).__name__)
            self.stop()
            raise Died from None
        except BaseException:
            self.stop()  # in the middle of a message, so it can't be used again
            raise

    async def _answer(self, parts: tuple[bytes, bytes]) -> bytearray:
        loop, connection = asyncio.get_running_loop(), self._socket
        assert connection is not None
        for each in (HEAD.pack(*map(len, parts)), *parts):
            await loop.sock_sendall(connection, each)
        size, _ = HEAD.unpack(await self._exactly(connection, HEAD.size))
        return await self._exactly(connection, size)

    @staticmethod
    async def _exactly(connection: socket.socket, size: int) -> bytearray:
        loop, found, at = asyncio.get_running_loop(), bytearray(size), 0
        while at < size:
            num = await loop.sock_recv_into(connection, memoryview(found)[at:])
            if not num:
                raise EOFError
            at += num
        return found


class _Piece:
    """A message that waits for a process, and its answer."""

    def __init__(self, parts: tuple[bytes, bytes]) -> None:
        self.parts, self.size = parts, sum(map(len, parts))
        self.answer: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()


class ReadingPool:
    """Some processes, and one lane a tenant. To be used from one event loop; ``close`` it when done."""

    def __init__(self, specification: Specification, num_processes: int, niceness: int = 0) -> None:
        self.processes = [ReadingProcess(specification, niceness) for _ in range(num_processes)]
        self._lanes: OrderedDict[str, deque[_Piece]] = OrderedDict()
        self._num_bytes: dict[str, int] = {}
        self._waiting = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of messages in lanes."""
        return sum(map(len, self._lanes.values()))

    async def ask(self, lane: str, parts: tuple[bytes, bytes]) -> bytearray:
        """Return the answer of a process, when the lane's turn has come. Raises Busy, Closed or ApiError 503."""
        if self._is_closed:
            raise Closed
        piece = _Piece(parts)
        self._enter(lane, piece)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._serve(each)) for each in self.processes]
        try:
            return await piece.answer
        except Died:
            raise problems.not_read() from None
        finally:
            self._leave(lane, piece)

    def close(self) -> None:
        """End the processes; waiting messages get Closed."""
        self._is_closed = True
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        for lane in self._lanes.values():
            for piece in lane:
                if not piece.answer.done():
                    piece.answer.set_exception(Closed())
        for process in self.processes:
            process.stop()

    def _enter(self, lane: str, piece: _Piece) -> None:
        waiting, size = self._lanes.get(lane, ()), self._num_bytes.get(lane, 0)
        if waiting and (len(waiting) >= MAX_WAITING or size + piece.size > MAX_WAITING_BYTES):
            raise Busy
        self._lanes.setdefault(lane, deque()).append(piece)
        self._num_bytes[lane] = size + piece.size
        self._waiting.release()

    def _leave(self, lane: str, piece: _Piece) -> None:
        """Take a piece off its lane, if it is still there. O(lane)."""
        waiting = self._lanes.get(lane)
        if waiting is not None and piece in waiting:
            waiting.remove(piece)
            self._shrunk(lane, piece)

    def _shrunk(self, lane: str, piece: _Piece) -> None:
        self._num_bytes[lane] -= piece.size
        if not self._lanes[lane]:
            del self._lanes[lane], self._num_bytes[lane]

    def _next(self) -> _Piece | None:
        """Return the next piece, from the next lane in turn."""
        if not self._lanes:
            return None
        lane, waiting = next(iter(self._lanes.items()))
        piece = waiting.popleft()
        self._lanes.move_to_end(lane)
        self._shrunk(lane, piece)
        return piece

    async def _serve(self, process: ReadingProcess) -> None:
        while True:
            await self._waiting.acquire()
            piece = self._next()
            if piece is None:
                continue  # it has left its lane
            try:
                answer = await process.ask(piece.parts)
            except asyncio.CancelledError:
                _settle(piece, Closed())
                raise
            except Exception as error:  # noqa: BLE001 the waiting caller gets it
                _settle(piece, error)
            else:
                if not piece.answer.done():
                    piece.answer.set_result(answer)


def _environment() -> dict[str, str]:
    """Return the service's environment without its settings, because some are secrets; module paths are kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _settle(piece: _Piece, error: Exception) -> None:
    if not piece.answer.done():
        piece.answer.set_exception(error)
