"""Keep paths, user names, host names and secrets out of everything that a study leaves behind."""

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stallbench.config import ROOT

# An absolute path of two parts or more that no rule below has named; not the slash of MB/s, of a URL or of a tag.
_PATH = re.compile(r"(?<![\w.:/<>~+-])/(?:[^\s/'\"`<>()\[\]{}|,;:]+/)+[^\s'\"`<>()\[\]{}|,;:]*")
_URL_SECRETS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def _forms(place: str) -> set[str]:
    """Give what an error may call a place by: a path in its forms, or a URL, its host or bucket, and its path."""
    _, is_url, rest = place.partition("://")
    if not is_url:
        return {place, str(Path(place).expanduser().absolute()), os.path.realpath(place)}
    host = rest.split("/")[0]
    endpoints = {value for name, value in os.environ.items() if name.startswith("AWS_ENDPOINT_URL")}
    return {place, rest, host, host.rpartition("@")[2].partition(":")[0], *endpoints}


class Redactor:
    """Replace what identifies a machine or its user by what it stands for.

    Parameters
    ----------
    targets
        Pairs of a target's name and its directory; the directory becomes ``<name>``.
    show_paths
        Keep paths (secrets still go).
    """

    def __init__(self, targets: Iterable[tuple[str, str | Path]] = (), show_paths: bool = False) -> None:
        self._show_paths = show_paths
        words: dict[str, str] = {}
        for name, secret in os.environ.items():
            if _SECRET_NAME.search(name) and len(secret) >= 6:
                words[secret] = "<secret>"
        if not show_paths:
            for name, path in targets:
                for form in _forms(str(path)):
                    words.setdefault(form, f"<{name}>")
            for path, stands_for in self._places():
                words.setdefault(path, stands_for)
        pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if len(word) > 1)
        self._words, self._pattern = words, re.compile(pattern) if pattern else None
        self._names = None if show_paths else self._name_pattern()

    @staticmethod
    def _places() -> Iterable[tuple[str, str]]:
        for path, stands_for in (
            (ROOT, "<stallbench>"),
            (sys.prefix, "<venv>"),
            (sys.base_prefix, "<python>"),
            (tempfile.gettempdir(), "<tmp>"),
            (Path.cwd(), "<cwd>"),
            (Path.home(), "<home>"),
        ):
            for form in {str(path), os.path.realpath(path)}:
                if form.count("/") > 1 or stands_for == "<home>":
                    yield form, stands_for

    @staticmethod
    def _name_pattern() -> re.Pattern[str] | None:
        names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
        try:
            names.add(getpass.getuser())
        except (OSError, KeyError):
            pass
        # Names that are plain words of this report's own language identify nobody and would garble it.
        names -= {"", "localhost", "root", "user", "disk", "nas", "data", "study", "target", "runner", "jovyan"}
        names = {name for name in names if len(name) > 2}
        return re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names)) if names else None

    def text(self, text: str) -> str:
        """Redact one string."""
        if self._pattern:
            text = self._pattern.sub(lambda match: self._words[match[0]], text)
        text = _URL_SECRETS.sub(r"\g<scheme><secret>@", text)
        if self._show_paths:
            return text
        text = _PATH.sub("<path>", text)
        return self._names.sub("<name>", text) if self._names else text

    def tree(self, value: Any) -> Any:
        """Redact every string in nested dicts and lists; images (whose text is base64) pass untouched."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.tree(item) for item in value]
        if isinstance(value, dict):
            return {key: item if str(key).startswith("image/") else self.tree(item) for key, item in value.items()}
        return value
