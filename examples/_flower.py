"""Start Flower's superlink and supernodes as processes on this machine, with TLS, and count the bytes between them."""

import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
_NAP, _BEGINS = 0.1, 300  # seconds: between looks, and until the superlink listens


class FlowerFailed(Exception):
    """A process of Flower ended, or a run did not end well; the message shows the end of its output."""


def write_certificates(folder: Path) -> None:
    """Write ca.pem, server.pem and server.key: of an authority of this run's own, and of a server on this machine."""
    now, authority = datetime.datetime.now(datetime.timezone.utc), ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())

    def certificate(name: str, public, *extensions):
        made = x509.CertificateBuilder(
            issuer_name=_name("grace_ext example authority"),
            subject_name=_name(name),
            public_key=public,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + datetime.timedelta(days=2),
        )
        for extension in extensions:
            made = made.add_extension(extension, critical=False)
        return made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))])
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    (folder / "ca.pem").write_bytes(
        certificate(
            "grace_ext example authority",
            authority.public_key(),
            x509.BasicConstraints(ca=True, path_length=None),
            identifier,
        )
    )
    (folder / "server.pem").write_bytes(
        certificate(
            "localhost", key.public_key(), names, x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        )
    )
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Relay:
    """Passes on TCP connections to a port of loopback, as they are, and counts the bytes in both directions.

    down, up: bytes from the server to its clients, and from them to it, so far: of TLS records, with all that is in them.
    """

    def __init__(self, port: int):
        self._to, self.down, self.up = port, 0, 0
        self._lock, self._server = threading.Lock(), socket.create_server((HOST, 0), backlog=64)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                try:
                    server = socket.create_connection((HOST, self._to))
                except OSError:
                    client.close()
                    continue
                for ends, way in (((client, server), "up"), ((server, client), "down")):
                    threading.Thread(target=self._pass_on, args=(*ends, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):  # one end is gone
            while data := source.recv(1 << 16):
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()


class Federation:
    """A superlink, and its supernodes behind a relay; all are processes of their own, and end with the `with` block.

    Args:
        folder: Where certificates, settings and output go.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        write_certificates(folder)
        self._environment = {
            **os.environ,
            "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        self._port, self._processes = free_port(), {}
        self.relay: Relay | None = None

    def __enter__(self) -> "Federation":
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "example"\n\n[superlink.example]\naddress = "{HOST}:{self._port}"\n'
            f'root-certificates = "{self.folder / "ca.pem"}"\n'
        )
        tls = {"ca-certfile": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}
        command = [
            "flower-superlink",
            "--host",
            HOST,
            "--port",
            str(self._port),
            "--disable-runtime-dependency-installation",
        ]
        for option, name in tls.items():
            command += [f"--ssl-{option}", str(self.folder / name)]
        self._start("superlink", command)
        deadline = time.monotonic() + _BEGINS
        while not _listens(self._port):
            if self.poll("superlink") is not None or time.monotonic() > deadline:
                self._end(["superlink"], signal.SIGKILL, 0)
                raise FlowerFailed(f"the superlink does not listen:\n{self.output('superlink')[-4000:]}")
            time.sleep(_NAP)
        self.relay = Relay(self._port)
        return self

    def __exit__(self, *_) -> None:
        self._end([*self._processes], signal.SIGTERM, 5)
        for process in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.relay.close()

    def _left(self) -> list[int]:
        """Find what Flower's processes have started in sessions of their own: its environment has this federation's folder."""
        found, home = [], f"FLWR_HOME={self._environment['FLWR_HOME']}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if home in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def add(self, name: str, /, **config) -> None:
        """Start a supernode. config: its node config."""
        given = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        command = ["flower-supernode", "--root-certificates", str(self.folder / "ca.pem"), "--superlink"]
        command += [f"{HOST}:{self.relay.port}", "--host", HOST, "--port", str(free_port())]
        self._start(name, [*command, "--node-config", given])

    def kill(self, name: str) -> None:
        """End a process at once, with all that it has started."""
        self._end([name], signal.SIGKILL, 0)

    def _end(self, names: list[str], number: int, patience: float) -> None:
        """Send processes a signal; those that are still there some seconds later are killed."""
        ending, deadline = [self._processes.pop(name) for name in names], time.monotonic() + patience
        for sent in (number, signal.SIGKILL):
            for process in ending:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
            for process in ending:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for process in ending:
            process.wait()

    def start(self, app: Path, config: dict) -> None:
        """Start a Flower app, as the process "run". config: its run config."""
        given = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        self._start("run", ["flwr", "run", str(app), "example", "--run-config", given, "--stream"])

    def finish(self, timeout: float) -> None:
        """Wait for the end of the app. Raises FlowerFailed."""
        deadline = time.monotonic() + timeout
        while (status := self.poll("run")) is None:
            if time.monotonic() > deadline:
                raise FlowerFailed(f"the run took more than {timeout:g} s:\n{self.output('run')[-4000:]}")
            time.sleep(_NAP)
        if status:
            raise FlowerFailed(f"`flwr run` ended with status {status}:\n{self.output('run')[-4000:]}")

    def output(self, name: str) -> str:
        """Return what a process has printed so far."""
        return (self.folder / f"{name}.txt").read_text(errors="replace")

    def _start(self, name: str, command: list[str]) -> None:
        program = shutil.which(command[0], path=self._environment["PATH"])
        if program is None:
            raise FlowerFailed(f"{command[0]} was not found; pip install 'grace_ext[flower]' installs it")
        with open(self.folder / f"{name}.txt", "wb") as file:
            self._processes[name] = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def poll(self, name: str) -> int | None:
        """Return the exit status of a process; None while it runs."""
        return self._processes[name].poll()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
