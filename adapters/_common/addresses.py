"""By which of its addresses each rank can be reached from the others' hosts."""

import contextlib
import fcntl
import json
import os
import socket
import struct

import numpy as np

from grace_ext import ExchangeError
from grace_ext.transport import Transport

#: In the environment: the network interface that this rank is to use. The first that is set counts.
INTERFACE = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_PATIENCE = 3.0  # seconds for a connection to an address
_LOOPBACK = "127.0.0.1"


def agree_on_addresses(transport: Transport, name: str) -> list[str]:
    """Find an IPv4 address of each rank, under which the others reach it: a collective.

    The first rank says which addresses its interfaces have. Each other one takes the first of them that it can connect to, and
    the address that its own end of that connection has. If all ranks are on one host, they use its loopback interface.

    Args:
        transport: The ranks' transport. It may be that of another library than the one that is to use the addresses.
        name: What the names of the collectives begin with.

    Returns:
        The addresses, in the order of ranks.

    Raises:
        ExchangeError: Some rank reaches none of the first one's addresses; on all ranks.
    """
    with contextlib.ExitStack() as stack:
        offer = b""
        if transport.rank == 0:
            server = stack.enter_context(socket.create_server(("", 0), backlog=transport.size))
            offer = json.dumps([server.getsockname()[1], _addresses()]).encode()
        port, addresses = json.loads(transport.allgather(f"{name}.offer", np.frombuffer(offer, np.uint8)).wait().tobytes())
        own, reached = ("", "") if transport.rank == 0 else _reach(addresses, port)
        message = json.dumps([own, reached]).encode().ljust(64)
        answers = transport.allgather(f"{name}.reached", np.frombuffer(message, np.uint8)).wait().reshape(transport.size, -1)
    pairs = [json.loads(answer.tobytes()) for answer in answers]
    lost = [rank for rank, pair in enumerate(pairs) if rank and not pair[0]]
    if lost:
        raise ExchangeError(
            f"ranks {lost} reach none of the addresses {', '.join(addresses)} of rank 0: name the network interface to use in "
            f"the environment, {INTERFACE[0]}=eth0 for example"
        )
    # Whoever has the address that it has connected to is on the host of rank 0.
    first = next((reached for own, reached in pairs if own != reached), _LOOPBACK)
    return [first if own == reached else own for own, reached in pairs]


def _addresses() -> list[str]:
    """This host's addresses, or that of the interface that is to be used; the loopback interface's last."""
    interface = next((os.environ[variable] for variable in INTERFACE if os.environ.get(variable)), None)
    names = [interface] if interface else [name for _, name in socket.if_nameindex()]
    found = [address for name in names if (address := _address_of(name))]
    return sorted(found, key=lambda address: address.startswith("127."))


def _address_of(interface: str) -> str | None:
    """None if it has no IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _reach(addresses: list[str], port: int) -> tuple[str, str]:
    """This rank's end of the first connection that can be made, and the address at the other end; empty ones if there is none."""
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _PATIENCE) as connection:
            return connection.getsockname()[0], address
    return "", ""
