"""The commit protocol: a checkpoint has its final name only once it is complete and on stable storage."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from stallbench.config import MANIFEST
from stallbench.storage.pagecache import files_below, sync_file, sync_tree

_FINAL = re.compile(r"checkpoint-(\d+)")
_PARTIAL, _REPLACED = ".stallbench-partial", ".stallbench-replaced"
_OURS = re.compile(r"\.(checkpoint-\d+)\.stallbench-(partial|replaced)")
# FUSE file systems over object stores: a folder is renamed there by copying each object.
NO_RENAME = {"fsspec", "fuse.s3fs", "fuse.goofys", "fuse.geesefs", "fuse.rclone", "fuse.gcsfuse", "fuse.mountpoint-s3"}


def final_folder(parent: Path, step: int) -> Path:
    """Name the folder of a finished checkpoint as the Trainer does; its state is read by ours alone."""
    return parent / f"checkpoint-{step}"


def partial_folder(final: Path, rename: bool) -> Path:
    """Name the folder that a checkpoint is written to: a hidden sibling, or the final one on a store without rename."""
    return final.with_name(f".{final.name}{_PARTIAL}") if rename else final


def open_partial(folder: Path) -> None:
    """Make the folder afresh."""
    _clear(folder)
    folder.mkdir(parents=True)


def write_manifest(folder: Path, method: str, step: int) -> None:
    """List the checkpoint's files with their sizes."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in files_below(folder)}
    (folder / MANIFEST).write_text(json.dumps({"method": method, "step": step, "files": files}))


def make_durable(folder: Path, method: str, step: int, rename: bool) -> None:
    """Put all files on stable storage, with the manifest; on a store without rename the manifest comes last."""
    if rename:
        write_manifest(folder, method, step)
        sync_tree(folder)
    else:
        sync_tree(folder)
        write_manifest(folder, method, step)
        sync_file(folder / MANIFEST)
        sync_file(folder)


def publish(partial: Path, final: Path) -> None:
    """Give a durable checkpoint its final name, durably; an older one of the same step is replaced."""
    if partial == final:
        return
    replaced = final.with_name(f".{final.name}{_REPLACED}")
    _adopt(final, partial)
    if final.exists() or final.is_symlink():
        _clear(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync_file(final.parent)
    _clear(replaced)


def _adopt(final: Path, partial: Path) -> None:
    """Keep what a callback put into the checkpoint's folder before it was there (an adapter, a tokenizer).

    A whole checkpoint that bears the name, of ours or in the Trainer's own layout, is replaced instead.
    """
    whole = (final / MANIFEST).exists() or (final / "trainer_state.json").exists()
    if final.is_symlink() or not final.is_dir() or whole:
        return
    for entry in sorted(final.iterdir()):
        if not (partial / entry.name).exists():
            entry.rename(partial / entry.name)
    sync_tree(partial)


def discard(folder: Path, rename: bool) -> None:
    """Delete a checkpoint so that one that is half deleted, by a process killed meanwhile, is never taken for one.

    What can't be deleted stays: that is no reason to end a training.
    """
    with suppress(OSError):
        if rename:
            doomed = partial_folder(folder, rename)
            _clear(doomed)
            folder = folder.rename(doomed)
        else:
            (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _clear(path: Path) -> None:
    """Remove a folder; of a link the link only."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def manifest(folder: Path) -> dict | None:
    """Read the manifest of a complete checkpoint of ours; None if it isn't ours or not all of it is there."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        whole = all(os.stat(folder / name).st_size == size for name, size in found["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever somebody else's file may hold
        return None
    return found if whole else None


def complete_checkpoints(parent: Path) -> list[Path]:
    """Give the complete checkpoints of ours in a folder, oldest step first."""
    found = [path for path in parent.glob("checkpoint-*") if _FINAL.fullmatch(path.name) and manifest(path)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Give the step that a checkpoint's name tells."""
    return int(folder.name.removeprefix("checkpoint-"))


def recover(parent: Path) -> None:
    """Clear what a killed process left: partial checkpoints go; one that was about to be replaced gets its name back.

    Only folders with names that this protocol makes are touched.
    """
    for path in sorted(parent.glob(".checkpoint-*")):
        match = _OURS.fullmatch(path.name)
        if not match or not path.is_dir() or path.is_symlink():
            continue
        final = parent / match[1]
        if match[2] == "replaced" and not final.exists():
            path.rename(final)
            sync_file(parent)
        else:
            shutil.rmtree(path, ignore_errors=True)
