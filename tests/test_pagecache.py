import os
from pathlib import Path

import pytest

from stallbench.storage.pagecache import drop_tree, files_below, resident_pages, sync_tree, tree_size


def test_written_pages_are_resident_and_gone_after_a_drop(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(os.urandom(8 << 20))
    assert resident_pages(path) == 2048
    assert drop_tree(tmp_path) == "cold"
    assert resident_pages(path) == 0


def test_a_file_in_use_elsewhere_is_not_called_cold(tmp_path):
    """A mapped page can't be dropped, and the verdict must say so."""
    import mmap

    path = tmp_path / "a"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:] = mapping[:]
        assert drop_tree(tmp_path) == "warm"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system here")
def test_a_memory_file_system_is_never_called_cold():
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "a").write_bytes(b"x" * 100_000)
        assert drop_tree(Path(folder)) == "warm"


def test_size_and_sync_cover_the_tree_and_follow_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"12345")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "a").write_bytes(b"123")
    (tree / "empty").touch()
    (tree / "link").symlink_to(outside)
    assert [path.name for path in files_below(tree)] == ["empty", "a"]
    assert tree_size(tree) == (3, 2)
    sync_tree(tree)
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "missing")
