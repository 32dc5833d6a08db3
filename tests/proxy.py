"""A TCP proxy on the loopback interface whose network fails in the ways a test asks for."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a port of the loopback interface; its attributes may be changed at any time.

    Attributes:
        port: Where it listens.
        target: The port it forwards to.
        delay: Seconds by which every packet is late.
        piece: Packets are cut into pieces of this many bytes; 0 leaves them whole.
        dropped: The directions in which packets vanish: "up" to the server, "down" to the client.
        held: Packets are kept until this is False again.
        refused: New connections are closed at once.
        reset_share: The share of packets to the server after which the connection is reset, once they have arrived.
        half_close_share: The share of packets of which only half arrives before the connection is half closed.
        faults: How many packets or connections it has dropped, reset or half closed.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self.piece = 0
        self.dropped: frozenset[str] = frozenset()
        self.held = False
        self.refused = False
        self.reset_share = 0.0
        self.half_close_share = 0.0
        self.faults = 0
        self._random = random.Random(20261115)
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()
        self.held = False
        self.cut()

    def calm(self) -> None:
        """Make the network faultless again; connections that lost packets are reset, as a real network would."""
        self.delay = self.piece = 0
        self.reset_share = self.half_close_share = 0.0
        self.refused = self.held = False
        if self.dropped:
            self.dropped = frozenset()
            self.cut()

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            self.faults += 1
            _reset(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                if self.refused:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                self.faults += 1
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:  # From now on, another thread may reset them.
                self._connections += [client, server]
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self._forward, args=(source, sink, way), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while packet := source.recv(65536):
                if self.delay:
                    time.sleep(self.delay)
                while self.held:
                    time.sleep(0.01)
                if way in self.dropped:
                    self.faults += 1
                    continue
                if self._random.random() < self.half_close_share:
                    self.faults += 1
                    sink.sendall(packet[: len(packet) // 2])
                    sink.shutdown(socket.SHUT_WR)
                    return
                piece = self.piece or len(packet)
                for start in range(0, len(packet), piece):
                    sink.sendall(packet[start : start + piece])
                if way == "up" and self._random.random() < self.reset_share:
                    self.faults += 1
                    time.sleep(0.002)  # The server may act on it; its answer is lost.
                    break
        except OSError:
            pass
        for end in (source, sink):
            _reset(end)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.shutdown(socket.SHUT_RDWR)  # Wakes the thread that reads from it.
    connection.close()
