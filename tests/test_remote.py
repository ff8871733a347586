"""Trials on URLs, against real servers on loopback."""

import json
import os
import subprocess

import pandas as pd
import pytest

from servers import ACCESS_KEY, SECRET_KEY, missing, s3_server, sftp_server
from stallbench.config import ConfigError, StudyConfig, Target, TrialConfig, parse_target
from stallbench.remote import connect
from stallbench.trial import Trial

FIVE = {"steps": 10, "every_steps": 2}
pytestmark = [pytest.mark.xdist_group("servers"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """The URL of a bucket on a real S3 server."""
    if reason := missing("ceph-mon", "ceph-osd", "radosgw"):
        pytest.skip(reason)
    pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        fs, _ = connect(Target(name="s3", location="s3://planted-bucket"))
        fs.mkdir("planted-bucket")
        yield "s3://planted-bucket/somewhere"


@pytest.fixture
def sftp(tmp_path, monkeypatch):
    """The URL of a folder on a real SFTP server, the folder, and the server's process."""
    if reason := missing("sshd", "ssh-keygen"):
        pytest.skip(reason)
    pytest.importorskip("paramiko")
    import fsspec

    with sftp_server(tmp_path) as (port, key, server):
        monkeypatch.setitem(fsspec.config.conf, "sftp", {"key_filename": str(key), "look_for_keys": False})
        served = tmp_path / "planted-folder"
        served.mkdir()
        (served / "thesis.txt").write_text("do not touch")
        yield f"sftp://root@127.0.0.1:{port}{served}", served, server


def make(tiny: dict, target: str, out, method: str = "torch", **overrides) -> Trial:
    values = tiny | FIVE | {"target": target, "method": method, "out": str(out), "wait": "return"} | overrides
    return Trial(TrialConfig.parse(**values))


def run(trial: Trial) -> tuple[dict, pd.DataFrame]:
    trial.put_data()
    trial.train()
    trial.restore()
    trial.control()
    out = trial.finish()
    return json.loads((out / "trial.json").read_text()), pd.read_parquet(out / "spans.parquet")


def assert_proven(result: dict, spans: pd.DataFrame) -> None:
    assert result["checks"]["restored_equal"] and result["checks"]["next_step_equal"]
    assert result["checks"]["training_data_cache"] == "local copy"
    assert list(spans[(spans.kind == "save")].step) == [2, 4, 6, 8, 10]
    assert set(spans[spans.kind == "restore"].cache_server) == {"unknown"}
    assert set(spans[spans.kind == "raw_read"].part) == {"fsspec"}


@pytest.mark.parametrize("method", ["torch", "safetensors", "dcp", "staged"])
def test_five_saves_on_sftp_come_back_to_the_bit(sftp, tiny, tmp_path, method):
    url, served, _ = sftp
    result, spans = run(make(tiny, url, tmp_path / "out", method))
    assert_proven(result, spans)
    assert spans[spans.kind == "commit"].end_s.notna().all()  # OpenSSH's server can fsync
    assert [path.name for path in served.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("method", ["torch", "safetensors", "dcp", "staged"])
def test_five_saves_on_s3_come_back_to_the_bit(s3, tiny, tmp_path, method):
    result, spans = run(make(tiny, s3, tmp_path / "out", method))
    assert_proven(result, spans)
    fs, root = connect(Target(name="s3", location=s3))
    assert fs.find(root) == []
    for path in (tmp_path / "out").iterdir():
        assert not [word for word in (ACCESS_KEY, SECRET_KEY, "planted-bucket") if word.encode() in path.read_bytes()]


def test_a_server_that_cannot_sync_has_no_durable_time(sftp, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("stallbench.remote.FSYNC", "no-such-extension@openssh.com")
    _, spans = run(make(tiny, sftp[0], tmp_path / "out"))
    assert spans[spans.kind == "commit"].end_s.isna().all()


def test_a_server_that_dies_fails_the_trial_and_nothing_partial_looks_complete(sftp, tiny, tmp_path):
    url, served, server = sftp
    one = make(tiny, url, tmp_path / "out")
    one.put_data()
    pids = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
    for pid in [str(server.pid), *pids]:
        os.kill(int(pid), 9)
    with pytest.raises(Exception):  # noqa: B017 (the driver's own kind)
        one.train()
    reason = json.loads((one.out / "failure.json").read_text())["reason"]
    assert reason and "\n" not in reason and "planted" not in reason
    assert list(served.rglob("stallbench-manifest.json")) == []


def test_a_method_that_cannot_write_there_is_refused():
    targets = (Target(name="a", location="/x"), Target(name="b", location="s3://bucket/p"))
    with pytest.raises(ConfigError, match="method='fast' can't write to the URL of target b; use staged, dcp, torch"):
        StudyConfig.parse(targets=targets, methods=("torch", "fast"))


@pytest.mark.parametrize("url", ["s3://key:hunter22@bucket/p", "https://host/p?X-Amz-Signature=hunter22", "s3://"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError) as refused:
        parse_target(f"a={url}")
    assert "hunter22" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_bucket_that_is_not_there_is_refused_in_one_line(s3, tiny, tmp_path):
    with pytest.raises(ConfigError, match="takes no files") as refused:
        make(tiny, "s3://no-such-bucket/x", tmp_path / "out")
    assert "\n" not in str(refused.value)
