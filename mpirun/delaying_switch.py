"""The switch of the hosts of mpirun/hosts when packets take their time: started by it, in the namespace of the switch.

    delaying_switch.py MILLISECONDS PORT ...

It passes each frame on after the delay, in user space, since many kernels lack netem. Frames are passed on as the kernel gives them,
large ones and those without a checksum included (PACKET_VNET_HDR). Limits of rates are those of the ports, before and after.
"""

import collections
import select
import socket
import sys
import time

ALL_PROTOCOLS = 0x0003
SOL_PACKET, VNET_HEADER, IGNORE_OUTGOING = 263, 15, 23  # of linux/if_packet.h
SNDBUFFORCE, RCVBUFFORCE = 32, 33
HEADER = 10  # bytes that VNET_HEADER puts before a frame
LONGEST = 2**17
BUFFER = 2**26  # bytes that may wait in the kernel; less would lose packets that a port has let through
AT_ONCE = 64  # frames taken from a port before others have their turn


def open_port(name):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    port.setsockopt(SOL_PACKET, VNET_HEADER, 1)
    port.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, BUFFER)
    port.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, BUFFER)
    port.bind((name, ALL_PROTOCOLS))
    port.setblocking(False)
    return port


def take(port, due, waiting, behind):
    """Take what a port has received, and note which sender is behind it."""
    for _ in range(AT_ONCE):
        try:
            frame = port.recv(LONGEST)
        except OSError:  # nothing more, or the link is down
            return
        behind[frame[HEADER + 6 : HEADER + 12]] = port
        waiting.append((due, frame, port))


def pass_on(frame, origin, ports, behind):
    port = behind.get(frame[HEADER : HEADER + 6])
    for one in [port] if port else [other for other in ports if other is not origin]:
        try:
            one.send(frame)
        except OSError:  # its queue is full, or the link is down: the frame is lost
            pass


def main():
    delay, ports = float(sys.argv[1]) / 1000, [open_port(name) for name in sys.argv[2:]]
    by_number = {port.fileno(): port for port in ports}
    poll = select.epoll()
    for port in ports:
        poll.register(port, select.EPOLLIN)
    waiting, behind = collections.deque(), {}
    print("ready", flush=True)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1
        for number, _ in poll.poll(patience):
            take(by_number[number], time.monotonic() + delay, waiting, behind)
        while waiting and waiting[0][0] <= time.monotonic():
            _, frame, origin = waiting.popleft()
            pass_on(frame, origin, ports, behind)


main()
