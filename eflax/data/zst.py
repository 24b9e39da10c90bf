"""Files compressed by zstd."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 17  # bytes read at once


def open_zst(path: Path, zstandard: Any) -> io.BufferedReader:
    """Return the content of a file as a stream, by the package zstandard.

    Reading raises EOFError where a frame is damaged or not whole.
    """
    return io.BufferedReader(_Stream(_decompress(path, zstandard)), BLOCK)


def _decompress(path: Path, zstandard: Any) -> Iterator[bytes]:
    """Yield the content of all frames; the library's own reader takes a cut one for the end of the file."""
    frame = None
    with path.open("rb") as file:
        try:
            while content := file.read(BLOCK):
                while content:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(content)
                    content, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
    if frame is not None:
        raise EOFError("the last zstd frame is not whole")


class _Stream(io.RawIOBase):
    """Blocks of bytes as a file to read."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
