"""Trials on URLs, against real servers on loopback."""

import json
import subprocess
import sys
from contextlib import ExitStack

import pandas as pd
import pytest

from conftest import contents, run
from servers import ACCESS_KEY, SECRET_KEY, kill, missing, s3_server, sftp_server
from stallbench.config import ConfigError, StudyConfig, Target, TrialConfig, parse_target
from stallbench.storage.ownership import MARKER, machine_id
from stallbench.storage.remote import Store, connect
from stallbench.storage.targets import claim
from stallbench.trial import Trial

FIVE = {"steps": 10, "every_steps": 2}
pytestmark = [pytest.mark.xdist_group("servers"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="session")
def gateway(tmp_path_factory):
    """A real S3 server with one bucket."""
    if reason := missing("ceph-mon", "ceph-osd", "radosgw"):
        pytest.skip(reason)
    pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("s3")) as gateway, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", gateway.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        fs, _ = connect(Target(name="s3", location="s3://planted-bucket"))
        fs.mkdir("planted-bucket")
        fs.pipe_file("planted-bucket/somewhere/thesis.txt", b"do not touch")
        fs.pipe_file("planted-bucket/somewhere/stallbench-000000000000-0/notes.txt", b"no marker of ours")
        yield gateway


@pytest.fixture
def s3(gateway) -> str:
    """The URL of a prefix on it."""
    return "s3://planted-bucket/somewhere"


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Serve a folder by a real SFTP server; gives its URL, and the server's process."""
    if reason := missing("sshd", "ssh-keygen"):
        pytest.skip(reason)
    pytest.importorskip("paramiko")
    import fsspec

    with ExitStack() as servers:

        def start(folder, fsync: bool = True) -> tuple[str, subprocess.Popen]:
            port, key, server = servers.enter_context(sftp_server(tmp_path, fsync))
            monkeypatch.setitem(fsspec.config.conf, "sftp", {"key_filename": str(key), "look_for_keys": False})
            return f"sftp://root@127.0.0.1:{port}{folder}", server

        yield start


@pytest.fixture
def served(tmp_path):
    """A folder with somebody's file."""
    folder = tmp_path / "planted-folder"
    folder.mkdir()
    (folder / "thesis.txt").write_text("do not touch")
    return folder


def make(tiny: dict, target: str, out, method: str = "torch", **overrides) -> Trial:
    values = tiny | FIVE | {"target": target, "method": method, "out": str(out), "wait": "return"} | overrides
    return Trial(TrialConfig.parse(**values))


def reason(trial: Trial) -> str:
    text = json.loads((trial.out / "failure.json").read_text())["reason"]
    assert text and "\n" not in text and "planted" not in text.lower()
    return text


def objects(url: str) -> list[str]:
    fs, root = connect(Target(name="s3", location=url))
    return [name.removeprefix(f"{root}/") for name in fs.find(root)]


def assert_proven(result: dict, spans: pd.DataFrame, saves: int = 5) -> None:
    assert result["checks"]["restored_equal"] and result["checks"]["next_step_equal"]
    assert result["checks"]["training_data_cache"] == "local copy"
    assert list(spans[spans.kind == "save"].step)[:saves] == list(range(2, 2 * saves + 1, 2))
    assert set(spans[spans.kind == "restore"].cache_server) == {"unknown"}
    assert set(spans[spans.kind == "raw_read"].part) == {"fsspec"}


# Through fsspec's SFTP files, which wait for each 32 KiB, DCP takes seconds a save: one is enough.
@pytest.mark.parametrize(("method", "saves"), [("safetensors", 5), ("staged", 5), ("dcp", 1)])
def test_saves_on_sftp_come_back_to_the_bit(serve, served, tiny, tmp_path, method, saves):
    url, _ = serve(served)
    result, spans = run(make(tiny, url, tmp_path / "out", method, steps=2 * saves, warmup_saves=0))
    assert_proven(result, spans, saves)
    assert spans[spans.kind == "commit"].end_s.notna().all()  # OpenSSH's server can fsync
    assert [path.name for path in served.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("method", ["torch", "dcp"])  # staged: in the study below
def test_five_saves_on_s3_come_back_to_the_bit(s3, tiny, tmp_path, method):
    result, spans = run(make(tiny, s3, tmp_path / "out", method))
    assert_proven(result, spans)
    assert objects(s3) == ["stallbench-000000000000-0/notes.txt", "thesis.txt"]


def test_a_server_that_cannot_sync_has_no_durable_time(serve, served, tiny, tmp_path):
    url, _ = serve(served, fsync=False)
    result, spans = run(make(tiny, url, tmp_path / "out", steps=4))
    assert result["checks"]["restored_equal"]
    commits = spans[spans.kind == "commit"]
    assert len(commits) >= 2 and commits.end_s.isna().all()


def kill_before_the_second_manifest(monkeypatch, kill) -> None:
    """Kill the server when all files of the second save are there, but for its manifest."""
    put = Store._put

    def deadly(self: Store, path) -> None:
        if path.name == "stallbench-manifest.json" and path.parent.name == "checkpoint-4":
            kill()
        put(self, path)

    monkeypatch.setattr(Store, "_put", deadly)


def test_an_sftp_server_killed_in_a_save_fails_the_trial_and_nothing_partial_looks_complete(
    serve, served, tiny, tmp_path, monkeypatch
):
    url, server = serve(served)
    one = make(tiny, url, tmp_path / "out")
    one.put_data()
    kill_before_the_second_manifest(monkeypatch, lambda: kill(server))
    with pytest.raises(Exception):  # noqa: B017 (the driver's own kind)
        one.train()
    assert reason(one)
    partial = next(served.rglob("checkpoint-4"))
    assert (partial / "state.pt").stat().st_size > 5e6 and not (partial / "stallbench-manifest.json").exists()
    assert (partial.parent / "checkpoint-2" / "stallbench-manifest.json").exists()
    server.wait()
    # The next start knows the partial one from the complete one, and clears it away.
    url, _ = serve(served)
    fs, root = connect(Target(name="t", location=url))
    store = Store(fs, root, served)
    store.recover(partial.parent)
    assert [path.name for path in partial.parent.iterdir()] == ["checkpoint-2"]
    (partial.parent / "checkpoint-2" / "state.pt").write_bytes(b"short")
    store.recover(partial.parent)
    assert list(partial.parent.iterdir()) == []


def test_an_s3_server_killed_in_a_save_fails_the_trial_and_nothing_partial_looks_complete(
    gateway, s3, tiny, tmp_path, monkeypatch
):
    one = make(tiny, s3, tmp_path / "out")
    one.put_data()
    kill_before_the_second_manifest(monkeypatch, gateway.kill)
    with pytest.raises(Exception):  # noqa: B017 (the driver's own kind)
        one.train()
    gateway.start()
    assert reason(one)
    left = [name.split("/checkpoints/")[1] for name in objects(s3) if "/checkpoints/" in name]
    assert "checkpoint-2/stallbench-manifest.json" in left and "checkpoint-4/state.pt" in left
    assert "checkpoint-4/stallbench-manifest.json" not in left
    # It carries our marker, but our process runs: only once that is gone may another run remove it.
    fs, root = connect(Target(name="s3", location=s3))
    name = next(name for name in fs.find(root) if name.endswith("stallbench.json"))
    marker = json.loads(fs.cat_file(name))
    with claim(Target(name="s3", location=s3), "another"):
        assert fs.exists(name)
    fs.pipe_file(name, json.dumps(marker | {"pid": 2**22 + 1}).encode())
    with claim(Target(name="s3", location=s3), "another"):
        assert not fs.exists(name)
    assert objects(s3) == ["stallbench-000000000000-0/notes.txt", "thesis.txt"]


def test_a_server_that_is_full_fails_the_trial_in_one_line(serve, tiny, tmp_path):
    mount = tmp_path / "planted-small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=75m", "tmpfs", str(mount)], check=True)
    try:
        url, _ = serve(mount)
        one = make(tiny, url, tmp_path / "out")
        one.put_data()
        (mount / "somebody").write_bytes(b"x" * (70 << 20))
        with pytest.raises(OSError):
            one.train()
        assert reason(one)
        assert [path.name for path in mount.iterdir()] == ["somebody"]
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_two_studies_leave_each_other_alone_and_a_study_names_no_key_and_no_bucket(s3, command, tmp_path):
    with claim(Target(name="s3", location=s3), "other") as other:
        fs, root = connect(Target(name="s3", location=s3))
        fs.pipe_file(f"{root}/{other.name}/model", b"another study's")
        disk = tmp_path / "disk"
        disk.mkdir()
        folder = tmp_path / "results"
        arguments = ["--target", f"a={disk}", "--target", f"b={s3}", "--method", "staged"]
        arguments += ["--wait", "return", "--blocks", "1", "--no-report", "--out", str(folder)]
        done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(objects(s3)) == [
            "stallbench-000000000000-0/notes.txt", f"{other.name}/model", f"{other.name}/stallbench.json", "thesis.txt"
        ]  # fmt: skip
    assert len(list(folder.glob("trials/*/trial.json"))) == 2
    planted = [ACCESS_KEY, SECRET_KEY, "planted-bucket", "somewhere"]
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [(path.name, word) for path, text in texts.items() for word in planted if word.encode() in text] == []
    assert SECRET_KEY not in done.stdout + done.stderr


def test_a_key_that_is_denied_is_refused_in_one_line(s3, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-but-wrong")
    with pytest.raises(ConfigError, match="target target takes no files: ") as refused:
        make(tiny, s3, tmp_path / "out")
    assert "\n" not in str(refused.value) and "planted-but" not in str(refused.value)


def test_a_driver_that_is_missing_is_named_with_its_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="no driver for gs:// installed; run: pip install gcsfs"):
        connect(Target(name="b", location="gs://bucket/p"))


def test_a_method_that_cannot_write_there_is_refused():
    targets = (Target(name="a", location="/x"), Target(name="b", location="s3://bucket/p"))
    with pytest.raises(ConfigError, match="method='fast' can't write to the URL of target b; use staged, dcp, torch"):
        StudyConfig.parse(targets=targets, methods=("torch", "fast"))


@pytest.mark.parametrize(
    "url",
    ["s3://key:hunter22@bucket/p", "s3://key:hun/ter+hunter22@b", "https://host/p?X-Amz-Signature=hunter22", "s3://"],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url):
    for ask in (lambda: parse_target(f"a={url}"), lambda: TrialConfig.parse(target=url, method="torch")):
        with pytest.raises(ConfigError) as refused:
            ask()
        assert "hunter22" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_bucket_that_is_not_there_is_refused_in_one_line(s3, tiny, tmp_path):
    with pytest.raises(ConfigError, match="takes no files") as refused:
        make(tiny, "s3://no-such-bucket/x", tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_only_what_an_ended_run_of_this_machine_marked_is_removed_from_a_store(serve, served, tmp_path):
    """A marker that makes no sense names nobody who could have ended; one that is large is none of ours."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    pids = {"gone": ended.pid, "negative": -5, "zero": 0, "flag": True, "huge": 1 << 40, "text": "1", "none": None}
    for name, pid in pids.items():
        (served / f"stallbench-{name}").mkdir()
        marker = {"study_id": name, "machine": machine_id(), "pid": pid}
        (served / f"stallbench-{name}" / MARKER).write_text(json.dumps(marker))
        (served / f"stallbench-{name}" / "data").write_text("bytes")
    (served / "stallbench-long").mkdir()
    long = {"study_id": "long", "machine": machine_id(), "pid": ended.pid, "more": "x" * 5000}
    (served / "stallbench-long" / MARKER).write_text(json.dumps(long))
    before = contents(served)
    url, _ = serve(served)
    with claim(Target(name="box", location=url), "mine"):
        pass
    assert contents(served) == {name: text for name, text in before.items() if not name.startswith("stallbench-gone/")}
