import getpass
import os
import socket
import sys
from pathlib import Path

from conftest import TOKEN
from stallbench.privacy import Redactor


def test_paths_are_replaced_by_what_they_stand_for(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    redactor = Redactor([("nas", tmp_path / "a b")])
    text = f"[Errno 28] No space: '{tmp_path}/a b/x/y', {sys.prefix}/lib, /opt/secret/place/file.py:12, correct horse"
    assert redactor.text(text) == "[Errno 28] No space: '<nas>/x/y', <venv>/lib, <path>:12, <secret>"


def test_what_is_no_path_stays():
    text = "200 MB/s, 1/2, <b>bold</b>, https://example.org/a/b, a/b/c, wait=return"
    assert Redactor().text(text) == text


def test_credentials_in_an_address_go():
    assert Redactor(show_paths=True).text("s3://key:secret@host/bucket") == "s3://<secret>@host/bucket"


def test_show_paths_keeps_paths_and_not_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert Redactor(show_paths=True).text("/mnt/nas/x hf_abcdefgh") == "/mnt/nas/x <secret>"


def test_images_pass_untouched_and_nested_text_does_not():
    outputs = [{"data": {"image/png": "/home/base64/like", "text/plain": ["/home/somebody/x"]}}]
    assert Redactor().tree(outputs) == [{"data": {"image/png": "/home/base64/like", "text/plain": ["<path>"]}}]


def test_a_finished_study_names_no_machine_no_user_no_path_and_no_secret(finished):
    import pandas as pd

    home, user, host = str(Path.home()), getpass.getuser(), socket.gethostname()
    private = [
        TOKEN,
        "Läufwerk",
        str(finished.folder.parent),
        f"{home}/",
        sys.prefix,
        os.getcwd(),
        f"/tmp/pytest-of-{user}",
    ]
    private += [host] if len(host) > 3 else []
    texts = {
        path: path.read_text()
        for path in finished.folder.rglob("*")
        if path.suffix in {".json", ".ipynb", ".html", ".md"}
    }
    texts |= {path: pd.read_parquet(path).to_csv() for path in finished.folder.rglob("*.parquet")}
    assert len(texts) > 8 * 3
    found = [(path.name, word) for path, text in texts.items() for word in private if word in text]
    assert found == []
    assert all(
        "papermill" not in path.read_text() or path.name != "notebook.ipynb" or '"papermill": {' not in path.read_text()
        for path in texts
        if path.suffix == ".ipynb"
    )


def test_a_url_is_replaced_in_all_its_parts(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.internal:9000")
    redactor = Redactor([("b", "s3://planted-bucket/some/where"), ("c", "sftp://me-too@planted.host:2222/srv/deep")])
    text = "s3://planted-bucket/some/where/x, planted-bucket/some/where/x, http://store.internal:9000/planted-bucket"
    assert redactor.text(text) == "<b>/x, <b>/x, http://<name>/<name>"
    assert redactor.text("me-too at planted.host: /srv/deep/y") == "<name> at <name>: <c>/y"


def test_a_bucket_that_is_called_as_a_method_garbles_no_result():
    assert Redactor([("b", "s3://torch/prefix")]).text("torch") == "torch"
