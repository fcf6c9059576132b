"""A TCP proxy between a client and one server. It forwards bytes, or causes faults of a network.

proxy.cut("before")    the next bytes from the client are lost, and the connection breaks
proxy.cut("after")     the next bytes reach the server; the connection breaks before the answer gets back
proxy.refuse = True    new connections are closed at once, and existing ones are cut
proxy.reset = True     as refuse, but the client gets a reset, as from a server that died with an unread request
proxy.hold = True      a partition: nothing passes either way, without an error; new connections hang
proxy.delay_s = 0.05   everything passes later by this time
proxy.garble = bytes   these bytes replace the server's next answer, and the connection breaks
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import struct
import threading
import time
from typing import Literal

HOST = "127.0.0.1"
_TICK_S = 0.05

Fault = Literal["before", "after"]


class TcpProxy:
    """A proxy that listens on ``port`` as soon as it is made. ``close`` ends it."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.target = (host, port)
        self._tls = tls
        self.refuse = False
        self.reset = False
        self.hold = False
        self.delay_s = 0.0
        self.garble: bytes | None = None
        self.num_cut = 0
        self._fault: Fault | None = None
        self._is_closed = False
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self, fault: Fault | None) -> None:
        """Arm a fault for the next request, or disarm it."""
        self._fault = fault

    @property
    def is_armed(self) -> bool:
        """Whether the fault is armed and hasn't happened yet."""
        return self._fault is not None

    def connections(self) -> list[threading.Thread]:
        """Return a thread for each open connection. It ends once both sides are closed."""
        return [thread for thread in self._threads if thread.is_alive()]

    def close(self) -> None:
        """Close all connections, and wait for the threads."""
        self._is_closed = True
        self._thread.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        self._listener.settimeout(_TICK_S)
        while not self._is_closed:
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self._threads = self.connections()
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self.refuse:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = client if self._tls is None else self._tls.wrap_socket(client, server_side=True)
            with secured, socket.create_connection(self.target) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pump(secured, server)
                if self.reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        with selectors.DefaultSelector() as both:
            both.register(client, selectors.EVENT_READ, server)
            both.register(server, selectors.EVENT_READ, client)
            while not (self._is_closed or self.refuse):
                if self.hold:
                    time.sleep(_TICK_S)
                    continue
                for key, _ in both.select(_TICK_S):
                    if self.refuse or self.hold:  # set while this thread waited: nothing passes from now on
                        break
                    source, sink = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    data = source.recv(1 << 20)
                    while isinstance(source, ssl.SSLSocket) and source.pending():
                        data += source.recv(1 << 20)
                    if not data or (source is client and self._strikes(data, server)):
                        return
                    time.sleep(self.delay_s)
                    if source is server and self.garble is not None:
                        sink.sendall(self.garble)
                        return
                    sink.sendall(data)

    def _strikes(self, data: bytes, server: socket.socket) -> bool:
        fault, self._fault = self._fault, None
        if fault is None:
            return False
        self.num_cut += 1
        if fault == "after":
            server.sendall(data)
            server.recv(1 << 20)
        return True
