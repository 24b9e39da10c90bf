"""The idx file format of MNIST: four magic bytes, big-endian sizes, then the unsigned bytes of one array."""

import gzip
import math
import zlib

import numpy as np

UINT8_CODE = 0x08
GZIP_MAGIC = b"\x1f\x8b"


class DataError(ValueError):
    """A data file is missing, damaged or not what it should be; the message names it and the way out."""


def unpack(content: bytes, where: str) -> bytes:
    """Return `content` gunzipped when it is gzip, as it is otherwise.

    Raises:
        DataError: the gzip stream is damaged or cut short. `where` names the file in the message.
    """
    if not content.startswith(GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{where}: the gzip data is damaged or cut short ({error}); get the file again"
        ) from error


def parse_idx(content: bytes, where: str) -> np.ndarray:
    """Return the uint8 array of an idx file, gzipped or not.

    Args:
        content: the whole file.
        where: its name, for messages.

    Raises:
        DataError: wrong magic bytes, another type than unsigned byte, a length other than the header's, or a shape
            that no array has.
    """
    content = unpack(content, where)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UINT8_CODE:
        raise DataError(
            f"{where}: not an idx file of unsigned bytes (it begins with {content[:4].hex() or 'nothing'})"
        )
    rank = content[3]
    header_size = 4 + 4 * rank
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header_size, 4)]
    expected = header_size + math.prod(sizes)
    if len(content) != expected:
        raise DataError(
            f"{where}: the header announces shape {tuple(sizes)}, so {expected} bytes, but the file has "
            f"{len(content)}; get the file again"
        )
    try:
        return np.frombuffer(content, np.uint8, offset=header_size).reshape(sizes)
    except ValueError as error:  # of more axes, or larger ones around one of size 0, than NumPy has
        raise DataError(f"{where}: the header announces shape {tuple(sizes)}, {error}") from error
