"""A plain TCP transfer of known size; run as a script on two hosts of a lab.

`transfer.py receive PORT` and `transfer.py send PORT ADDRESS BYTES`. The receiver prints
`{"bytes": ..., "seconds": ...}`; the time is from the accepted connection to the last byte.
"""

from __future__ import annotations

import json
import socket
import sys
import time

CHUNK_BYTES = 1 << 16
CONNECT_SECONDS = 20.0


def receive(port: int) -> None:
    """Accept one connection, read it to its end and print what came."""
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
    with connection:
        start = time.perf_counter()
        buffer = bytearray(CHUNK_BYTES)
        received = 0
        while count := connection.recv_into(buffer):
            received += count
        print(json.dumps({"bytes": received, "seconds": time.perf_counter() - start}))


def send(port: int, address: str, payload_bytes: int) -> None:
    """Connect, waiting for the receiver to come up, and send `payload_bytes` zeros."""
    with _connect(port, address) as connection:
        chunk = bytes(CHUNK_BYTES)
        while payload_bytes > 0:
            connection.sendall(chunk[: min(payload_bytes, CHUNK_BYTES)])
            payload_bytes -= CHUNK_BYTES


def _connect(port: int, address: str) -> socket.socket:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
