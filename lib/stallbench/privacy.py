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

from stallbench.config import METHODS, ROOT

# An absolute path of two parts or more that no rule below has named; not the slash of MB/s, of a URL or of a tag.
_PATH = re.compile(r"(?<![\w.:/<>~+-])/(?:[^\s/'\"`<>()\[\]{}|,;:]+/)+[^\s'\"`<>()\[\]{}|,;:]*")
_URL_SECRETS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def _forms(place: str) -> set[str]:
    """Give what an error may call a place by: a path in its forms, or a URL, also without its scheme or host."""
    if "://" not in place:
        return {place, str(Path(place).expanduser().absolute()), os.path.realpath(place)}
    without_scheme = place.partition("://")[2].rstrip("/")
    path = "/" + without_scheme.partition("/")[2]
    return {place, without_scheme} | ({path} if path.count("/") > 1 else set())


def _hosts(places: Iterable[str]) -> set[str]:
    """Give the hosts, users and buckets of URLs, and the endpoint that S3 is asked at."""
    endpoints = [value for name, value in os.environ.items() if name.startswith("AWS_ENDPOINT_URL")]
    urls = [place.partition("://")[2] for place in places if "://" in place]
    parts = [url.split("/")[0] for url in (urls and [*urls, *(value.partition("://")[2] for value in endpoints)])]
    return {
        name for part in parts for name in (part, *part.rpartition("@")[::2], part.rpartition("@")[2].split(":")[0])
    }


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
        targets = list(targets)
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
        self._names = None if show_paths else self._name_pattern(_hosts(str(path) for _, path in targets))

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
    def _name_pattern(hosts: set[str]) -> re.Pattern[str] | None:
        names = hosts | {socket.gethostname(), socket.gethostname().partition(".")[0]}
        try:
            names.add(getpass.getuser())
        except (OSError, KeyError):
            pass
        # Names that are plain words of this report's own language identify nobody and would garble it.
        names -= {"", "localhost", "root", "user", "disk", "nas", "data", "study", "target", "runner", "jovyan"}
        names -= {*METHODS, "return", "durable", "127.0.0.1"}
        names = sorted((name for name in names if len(name) > 2), key=len, reverse=True)
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
