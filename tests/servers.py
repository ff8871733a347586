"""Real servers on loopback: OpenSSH's SFTP server, and Ceph's S3 gateway over stores in memory."""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ACCESS_KEY, SECRET_KEY = "PLANTEDACCESSKEY7Q2", "planted-secret-key-93b1f0"
_CEPH = """[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}/0]
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default pg num = 8
mon max pg per osd = 2000
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
public network = 127.0.0.0/8
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd0
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


def missing(*programs: str) -> str:
    """Say which of the servers' programs are not installed, or that they need root."""
    absent = [name for name in programs if not (shutil.which(name) or Path("/usr/sbin", name).exists())]
    return f"not installed: {', '.join(absent)}" if absent else "" if os.geteuid() == 0 else "needs root"


def free_port() -> int:
    """Give a port of loopback that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _await(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {port}")


@contextmanager
def sftp_server(folder: Path, fsync: bool = True) -> Iterator[tuple[int, Path, subprocess.Popen]]:
    """Serve SFTP with keys of its own, with or without fsync; gives the port, the client's key, and the process."""
    for name in ("host", "client"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], input=b"y\n", check=True
        )
    port = free_port()
    (folder / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/pid\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/client.pub\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"Subsystem sftp internal-sftp{'' if fsync else ' -P fsync'}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd.conf")], stderr=subprocess.DEVNULL
    )
    try:
        _await(port)
        yield port, folder / "client", server
    finally:
        server.terminate()
        server.wait()


def kill(server: subprocess.Popen) -> None:
    """Kill an SFTP server with all its connections, as a power cut would."""
    for process in [*psutil.Process(server.pid).children(recursive=True), server]:
        process.kill()


class Gateway:
    """Ceph's S3 gateway, which can be killed and started again over the same store."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port, self.endpoint = folder, port, f"http://127.0.0.1:{port}"

    def admin(self, *arguments: str) -> None:
        """Run ``radosgw-admin``."""
        command = ["radosgw-admin", "-c", "ceph.conf", *arguments]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=60)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = ["radosgw", "-c", "ceph.conf", "-n", "client.rgw.a", "--pid-file", f"{self._folder}/rgw.pid"]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=60)
        _await(self._port)

    def kill(self) -> None:
        """Kill it."""
        os.kill(int((self._folder / "rgw.pid").read_text()), 9)


@contextmanager
def s3_server(folder: Path) -> Iterator[Gateway]:
    """Serve S3 by Ceph's gateway. The keys are ``ACCESS_KEY`` and ``SECRET_KEY``."""
    ids = {"fsid": str(uuid.uuid4()), "mon_port": free_port(), "port": free_port(), "folder": folder}
    (folder / "ceph.conf").write_text(_CEPH.format(**ids))
    disk = str(uuid.uuid4())

    def do(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)

    def ceph(program: str, *arguments: str) -> None:
        do(program, "-c", "ceph.conf", *arguments)

    do("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{ids['mon_port']}]", "--fsid", ids["fsid"], "monmap")
    for name in ("mon", "osd0"):
        (folder / name).mkdir()
    try:
        ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap")
        ceph("ceph-mon", "-i", "a", "--pid-file", f"{folder}/mon.pid")
        ceph("ceph", "osd", "new", disk)
        ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        for left in reversed(range(5)):  # a monitor this young may still answer "wrong fsid"
            try:
                ceph("ceph-osd", "-i", "0", "--pid-file", f"{folder}/osd.pid")
                break
            except subprocess.CalledProcessError:
                if not left:
                    raise
                time.sleep(1)
        gateway = Gateway(folder, ids["port"])
        gateway.start()
        user = ["--uid=study", "--display-name=study", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        gateway.admin("user", "create", *user)
        yield gateway
    finally:
        for name in ("rgw", "osd", "mon"):
            if (folder / f"{name}.pid").exists():
                with suppress(ProcessLookupError):
                    os.kill(int((folder / f"{name}.pid").read_text()), 9)  # all lies in memory: nothing to end well
