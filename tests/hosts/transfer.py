"""Bytes over TCP: transfer.py receive, or transfer.py send HOST BYTES, which prints the seconds until all have arrived."""

import socket
import sys
import time

PORT = 5000

if sys.argv[1] == "receive":
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                while connection.recv(1 << 20):
                    pass
                connection.sendall(b".")
else:
    with socket.create_connection((sys.argv[2], PORT)) as connection:
        started = time.monotonic()
        connection.sendall(bytes(int(sys.argv[3])))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(time.monotonic() - started)
