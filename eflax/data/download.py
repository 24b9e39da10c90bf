"""Files from public mirrors into a cache folder: checked by sha256, never left half-written."""

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from eflax.data.idx import DataError, unpack
from eflax.progress import Progress

TIMEOUT_SECONDS = 30
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A file on one or more mirrors.

    Attributes:
        name: its name in the cache folder, where it lies unpacked.
        sha256: hex digest of the unpacked content, which does not depend on how a mirror compressed it.
        urls: where to get it, tried in this order; the content may be gzipped.
    """

    name: str
    sha256: str
    urls: tuple[str, ...]


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/eflax`, or `~/.cache/eflax` where the variable is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eflax"


def fetch_all(files: Sequence[RemoteFile], folder: Path, way_out: str) -> list[Path]:
    """Return the paths of `files` in `folder`, downloading those that are missing or damaged there.

    Args:
        files: what to get.
        folder: the cache folder, created if need be.
        way_out: what the user can do without network, said at the end of the error.

    Raises:
        DataError: no mirror gave a file with the right checksum; the message lists what each answered.
    """
    return [_fetch(file, folder, way_out) for file in files]


def _fetch(file: RemoteFile, folder: Path, way_out: str) -> Path:
    path = folder / file.name
    if path.is_file() and _digest(path.read_bytes()) == file.sha256:
        return path
    failures = []
    for url in file.urls:
        try:
            content = unpack(_read(url, f"download {file.name}"), url)
        except (OSError, HTTPException, DataError) as error:
            failures.append(f"  {url}: {error}")
            continue
        if _digest(content) == file.sha256:
            write_atomically(path, content)
            return path
        failures.append(f"  {url}: wrong sha256 {_digest(content)}, expected {file.sha256}")
    raise DataError(
        f"could not download {file.name} into {folder}:\n"
        + "\n".join(failures)
        + f"\nWithout network: {way_out}"
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(url: str, label: str) -> bytes:
    pieces = []
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        size = int(response.headers.get("Content-Length") or 0)
        with Progress(label, size / 1e6, unit="MB") as progress:
            while piece := response.read(CHUNK_BYTES):
                pieces.append(piece)
                progress.advance(len(piece) / 1e6)
    content = b"".join(pieces)
    if size and len(content) != size:
        raise DataError(f"got {len(content)} of {size} bytes")
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` under a temporary name beside `path`, then rename: `path` is never half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, 0o644)  # as open() would, and not private as temporary files are
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
