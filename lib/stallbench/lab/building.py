"""Emulated storage on real kernel I/O: ext4 on a block device with a disk's mechanics, behind a real link for a NAS.

The chain: nbdkit with `disk` (bytes in memory) → nbdfuse → a loop device with direct I/O → ext4. For a NAS, NBD
crosses a pair of network namespaces whose link is shaped by tc's tbf.
"""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil

from stallbench.config import ConfigError, Target
from stallbench.lab.profile import PROFILES, LabProfile, parse
from stallbench.spans import Timeline
from stallbench.storage import emulated, probe
from stallbench.storage.medium import LABS, Storage
from stallbench.storage.mounting import TIMEOUT_S, lacking, run_program
from stallbench.storage.targets import Workspace

PLUGIN = Path(__file__).with_name("disk.py")
PACKAGES = {  # Debian's, by program
    "fusermount3": "fuse3",
    "ip": "iproute2",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "nbdfuse": "libnbd-bin",
    "nbdkit": "nbdkit",
    "nsenter": "util-linux",
    "tc": "iproute2",
}
SIZE_BYTES = 4 << 30
PROBES = 3
DEVICE_FAULTS = {"eio-write": "write", "eio-flush": "flush", "eio-read": "read", "stall": "stall"}
FAULTS = (*DEVICE_FAULTS, "cut", "restore", "read-only")
# tbf counts a segment's 1448 bytes of data as 1514 (MTU 1500 and the Ethernet header).
_TBF_SHARE = 1448 / 1514

_children: list[subprocess.Popen] = []  # of this process; `down` reaps them


def missing() -> str:
    """Say in one line why there can be no lab here; empty when there can."""
    return lacking("a lab", PACKAGES)


def require(location: str) -> None:
    """Refuse ``lab:PROFILE`` where it can't be, without building anything.

    Raises
    ------
    ConfigError
        If there is no such profile, or no lab on this machine.
    """
    try:
        parse(location)
    except ValueError as error:
        raise ConfigError(f"target {location!r} is refused: {error}") from None
    if reason := missing():
        raise ConfigError(f"target {location!r} is refused: {reason}")


@dataclass
class Lab:
    """A running lab. ``lab_id`` names it, ``mountpoint`` is the root of its file system."""

    lab_id: str
    profile: LabProfile
    home: Path

    @property
    def mountpoint(self) -> Path:
        """Root of the file system."""
        return self.home / "mount"

    def fault(self, name: str, seconds: float = 30.0) -> None:
        """Turn a switch, one of `FAULTS`.

        Parameters
        ----------
        name
            ``eio-write``, ``eio-flush``, ``eio-read``; ``stall`` for some seconds; ``cut`` the link; ``read-only``, as
            ext4 makes itself after an error (``errors=remount-ro``), files open for writing or not; ``restore``.
            That undoes all, but for what wasn't durable yet when ext4 gave up, by its own judgement or by the switch:
            this is lost, as in a power cut, since the file system is unmounted and mounted again then.
        seconds
            Of the stall.

        Raises
        ------
        ValueError
            If there is no such switch, or no link to cut.
        RuntimeError
            If a program fails: ``restore`` where ext4 gave up and files on it are still open.
        """
        if name not in FAULTS or (name == "cut" and not self.profile.network):
            raise ValueError(f"no fault {name!r} on this lab; there are: {', '.join(FAULTS)} (cut: with a link only)")
        if name in ("cut", "restore") and self.profile.network:
            run_program("ip", "-n", f"{self.home.name}-c", "link", "set", "lab-c", "down" if name == "cut" else "up")
        if name == "read-only":
            run_program("mount", "-o", "remount,errors=remount-ro", str(self.mountpoint))
            # remount,ro is refused while files are open for writing; an error is not (fs/ext4/sysfs.c of Linux).
            (loop,) = _loops(self.home.name)
            Path("/sys/fs/ext4", Path(loop).name, "trigger_fs_error").write_text("the lab's read-only switch")
        if name in DEVICE_FAULTS:
            self._order({"fault": DEVICE_FAULTS[name], "value": seconds})
        if name == "restore":
            self._order({"fault": "restore"})
            self._mount_again_if_dead()

    def _mount_again_if_dead(self) -> None:
        """Start ext4 afresh if it gave up: a remount wouldn't."""
        try:
            os.close(os.open(self.mountpoint, os.O_TMPFILE | os.O_WRONLY))
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EIO):
                raise
            run_program("umount", str(self.mountpoint))
            _mount(*_loops(self.home.name), self.mountpoint)

    def counters(self) -> dict:
        """Give the device's requests and bytes by kind, and its positions."""
        return self._order({})

    def _order(self, order: dict) -> dict:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(TIMEOUT_S)
            caller.connect(str(self.home / "control"))
            caller.sendall(json.dumps(order).encode() + b"\n")
            answer = json.loads(caller.makefile().readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def up(profile: LabProfile, out: Callable[[str], object] = print, check: bool = True, kept: bool = True) -> Lab:
    """Build a lab and leave it running.

    Parameters
    ----------
    check
        Refuse a profile that asks for more than half of what the chain itself reaches (some 5 s).
    kept
        Whether it may outlive this process; else the next one to need a lab removes it.

    Raises
    ------
    ConfigError
        If something is missing, or the profile is refused.
    RuntimeError
        If a step fails; what was built till then is removed.
    """
    if reason := missing():
        raise ConfigError(reason)
    if check and not profile.unlimited:
        check_ceiling(profile)
    lab_id = uuid4().hex[:8]
    lab = Lab(lab_id, profile, emulated.default_folder()[0] / f"lab-{lab_id}")
    try:
        _build(lab, kept)
        out(f"lab {lab_id}: emulated storage on real kernel I/O, ext4 at {lab.mountpoint}")
        if check:
            out("probed: " + ", ".join(_words(*limit) for limit in limits_of(lab).items()))
    except BaseException:
        down(lab_id)
        raise
    return lab


def _build(lab: Lab, kept: bool) -> None:
    """Make all the parts; each is in the state file, by a name that nothing else has, before it is made."""
    LABS.mkdir(exist_ok=True)
    server, client = _commands(lab)
    state = {"lab_id": lab.lab_id, "profile": lab.profile.model_dump(), "home": str(lab.home), "owner": os.getpid()}
    state |= {"owner_began_s": psutil.Process().create_time(), "kept": kept}
    state |= {"processes": [server, client], "namespaces": _namespaces(lab)}
    (LABS / f"lab-{lab.lab_id}.json").write_text(json.dumps(state))
    for folder in (lab.home, lab.home / "device", lab.mountpoint):
        folder.mkdir(mode=0o700)
    image = lab.home / "image"
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    options = ["-b", "4096", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"]
    run_program("mkfs.ext4", "-q", "-F", *options, str(image))
    if lab.profile.network:
        _link(lab)
    enter = ["nsenter", "--net=/run/netns/{}"] if lab.profile.network else []
    device = lab.home / "device" / lab.home.name
    for side, command, ready in (("s", server, lab.home / "control"), ("c", client, device)):
        prefix = [word.format(f"{lab.home.name}-{side}") for word in enter]
        with (lab.home / "log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        _children.append(process)
        _wait_for(ready, process, lab.home / "log")
    # Without direct I/O a second page cache, that of the file below, would lie under the file system.
    loop = run_program("losetup", "--find", "--show", "--direct-io=on", str(device))
    _mount(loop, lab.mountpoint)


def _mount(loop: str, mountpoint: Path) -> None:
    run_program("mount", "-t", "ext4", loop, str(mountpoint))


def _namespaces(lab: Lab) -> list[str]:
    return [f"{lab.home.name}-{side}" for side in "cs"] if lab.profile.network else []


def _commands(lab: Lab) -> tuple[list[str], list[str]]:
    """Give the commands of server and client; the lab's id stands in both, so that they are known by their words."""
    profile, home = lab.profile, lab.home
    model = "null" if profile.unlimited else profile.model_dump_json()
    socket_path = str(home / "nbd")
    at = ["--ipaddr=10.11.12.1", "--port=10809"] if profile.network else [f"--unix={socket_path}"]
    plugin = [str(PLUGIN), f"file={home / 'image'}", f"control={home / 'control'}", f"model={model}"]
    server = ["nbdkit", "--foreground", "--log=stderr", "--threads=32", *at, "python", *plugin]
    way = ["--tcp", "10.11.12.1", "10809"] if profile.network else ["--unix", socket_path]
    return server, ["nbdfuse", str(home / "device" / home.name), *way]


def _link(lab: Lab) -> None:
    """Make two namespaces with a shaped link between them."""
    client, server = _namespaces(lab)
    run_program("ip", "netns", "add", client)
    run_program("ip", "netns", "add", server)
    run_program(*f"ip -n {client} link add lab-c type veth peer name lab-s netns {server}".split())
    rate_bits_per_s = round(lab.profile.link_bytes_per_s / _TBF_SHARE * 8)
    burst_bytes = max(256 << 10, rate_bits_per_s // 8 // 250)  # what passes in a tick of a kernel with 250 HZ
    for namespace, device, address in ((client, "lab-c", 2), (server, "lab-s", 1)):
        run_program(*f"ip -n {namespace} addr add 10.11.12.{address}/30 dev {device}".split())
        run_program(*f"ip -n {namespace} link set {device} up".split())
        shape = f"root tbf rate {rate_bits_per_s}bit burst {burst_bytes} latency 50ms"
        try:
            run_program(*f"tc -n {namespace} qdisc add dev {device} {shape}".split())
        except RuntimeError as error:
            raise ConfigError(f"a lab's link needs the kernel's sch_tbf: {error}") from None


def _wait_for(path: Path, process: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the lab's device didn't start: {log.read_text(errors='replace').strip()}")
        time.sleep(0.02)


def limits_of(lab: Lab) -> dict[str, float]:
    """Probe the lab with the patterns of `probe`: bytes/s by kind."""
    folder = lab.mountpoint / "probe"
    folder.mkdir()
    timeline = Timeline()
    try:
        probe.raw_limits(
            Workspace(Target(name="lab", location=str(folder)), folder, Storage("lab", "emulated")), timeline
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {span.kind: span.size_bytes / (span.end_s - span.start_s) for span in timeline.spans}


def _words(kind: str, bytes_per_s: float) -> str:
    counted = kind in ("raw_random", "raw_small")  # of one page each
    return (
        f"{kind} {probe.PAGE_BYTES / bytes_per_s * 1e3:.1f} ms" if counted else f"{kind} {bytes_per_s / 1e6:.0f} MB/s"
    )


def check_ceiling(profile: LabProfile) -> None:
    """Raise ConfigError if the profile asks for more than half of what the chain without limits reaches."""
    # The control has the profile's link in its way only if that is the profile's own limit.
    ceiling = 0.0
    with running(PROFILES["fast"], out=lambda line: None, check=False) as control:
        for _ in range(PROBES):  # what else runs here can only lower what a probe finds
            limits = limits_of(control)
            ceiling = max(ceiling, min(limits.get("raw_write", 0.0), limits.get("raw_read", 0.0)))
            if profile.sustained_bytes_per_s <= ceiling / 2:
                return
    raise ConfigError(
        f"lab profile needs {profile.sustained_bytes_per_s / 1e6:.0f} MB/s sustained, which is more than half of "
        f"the {ceiling / 1e6:.0f} MB/s that the chain itself reaches here; lower disk_bytes_per_s or spindles, or let "
        "nothing else run"
    )


@contextmanager
def running(profile: LabProfile, out: Callable[[str], object] = print, check: bool = True) -> Iterator[Lab]:
    """Build a lab as `up` does, and remove it at the end; those of processes that were killed are removed first."""
    for state in _states():
        if not state["kept"] and not _owner_lives(state):
            _remove(state)
    lab = up(profile, out, check, kept=False)
    try:
        yield lab
    finally:
        with suppress(ConfigError):  # taken down already, as it held a trial for too long
            down(lab.lab_id)


def down(lab_id: str | None = None) -> list[str]:
    """Remove one lab, whoever made it, or all but those that a running process holds; give the ids of those removed.

    Raises
    ------
    ConfigError
        If there is no lab of that id.
    """
    states = [
        state
        for state in _states()
        if state["lab_id"] == lab_id or (lab_id is None and (state["kept"] or not _owner_lives(state)))
    ]
    if lab_id and not states:
        raise ConfigError(f"there is no lab {lab_id!r}; see stallbench lab status")
    for state in states:
        _remove(state)
    return [state["lab_id"] for state in states]


def _states() -> list[dict]:
    found = []
    for path in sorted(LABS.glob("lab-*.json")):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def _owner_lives(state: dict) -> bool:
    try:
        return psutil.Process(state["owner"]).create_time() == state["owner_began_s"]
    except psutil.Error:
        return False


def _processes(state: dict) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():  # psutil compares the start time again before it kills
        with suppress(psutil.Error):
            if process.cmdline() in state["processes"]:
                found.append(process)
    return found


def _loops(name: str) -> list[str]:
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if Path(path.read_text().strip()).name == name:
                found.append(f"/dev/{path.parts[3]}")
    return found


def _remove(state: dict) -> None:
    """Kill the FUSE server first: what waits for the device then fails, and nothing hangs."""
    home = Path(state["home"])
    processes = _processes(state)
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=TIMEOUT_S)
    _children[:] = [child for child in _children if child.poll() is None]
    for folder in (home / "mount", home / "device"):
        if str(folder) in {mount.mountpoint for mount in psutil.disk_partitions(all=True)}:
            run_program("umount", "--lazy", str(folder))
        for loop in _loops(home.name):
            run_program("losetup", "--detach", loop)
    for namespace in state["namespaces"]:
        if Path("/run/netns", namespace).exists():
            run_program("ip", "netns", "delete", namespace)
    mounts = {mount.mountpoint for mount in psutil.disk_partitions(all=True)}
    if not any(Path(mount).is_relative_to(home) for mount in mounts):
        shutil.rmtree(home, ignore_errors=True)
        (LABS / f"{home.name}.json").unlink(missing_ok=True)


def status() -> list[dict]:
    """List the labs: id, mountpoint, whether mounted, live processes, loop devices, whether the maker lives."""
    return [
        {
            "lab_id": state["lab_id"],
            "mountpoint": f"{state['home']}/mount",
            "mounted": os.path.ismount(f"{state['home']}/mount"),
            "processes": [process.pid for process in _processes(state)],
            "loops": _loops(Path(state["home"]).name),
            "owner": state["owner"],
        }
        for state in _states()
    ]
