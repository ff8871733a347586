"""Real servers on loopback: OpenSSH's SFTP server, and Ceph's S3 gateway over stores in memory."""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
def sftp_server(folder: Path) -> Iterator[tuple[int, Path, subprocess.Popen]]:
    """Serve SFTP with keys of its own; gives the port, the client's key and the server's process."""
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/pid\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/client.pub\nPasswordAuthentication no\nPermitRootLogin yes\n"
        "Subsystem sftp internal-sftp\n"
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


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Serve S3 by Ceph's gateway; gives its endpoint. The keys are ``ACCESS_KEY`` and ``SECRET_KEY``."""
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
        ceph("ceph-osd", "-i", "0", "--pid-file", f"{folder}/osd.pid")
        ceph("radosgw", "-n", "client.rgw.a", "--pid-file", f"{folder}/rgw.pid")
        _await(ids["port"])
        user = ["--uid=study", "--display-name=study", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        ceph("radosgw-admin", "user", "create", *user)
        yield f"http://127.0.0.1:{ids['port']}"
    finally:
        for name in ("rgw", "osd", "mon"):
            if (folder / f"{name}.pid").exists():
                subprocess.run(["kill", (folder / f"{name}.pid").read_text().strip()])
