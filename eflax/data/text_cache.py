"""Tokenised text on disk: made once, in parallel, renamed into place when whole, and checked whenever it is opened."""

import hashlib
import json
import lzma
import multiprocessing
import os
import platform
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import batched
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt

from eflax.data.download import default_cache
from eflax.data.idx import DataError
from eflax.data.text_sources import HUB, PYTHON, read_documents, source_files
from eflax.data.tokenizers import Tokenizer, load_tokenizer
from eflax.progress import Progress

FORMAT = "eflax-tokens-1"
TOKENS, STARTS, META = "tokens.bin", "starts.bin", "meta.json"
TOKEN_FILES = (".u16", ".u32", ".u16.xz", ".u32.xz")
BLOCK = 1 << 24  # bytes read, written and checked at once
BATCH = 64  # documents that a worker gets at once
PARALLEL_FROM = 1 << 24  # bytes of files from which several processes are worth their start

type Pieces = Iterator[
    tuple[UInt[np.ndarray, " N"], int]
]  # ids of whole or partial documents, and units of progress


@dataclass(frozen=True)
class TokenStore:
    """The tokens of a source, one document after the other, each beginning with the tokenizer's bos.

    Attributes:
        name: the source.
        tokens: all ids.
        starts: where documents begin in `tokens`.
        fingerprint: changes with any token.
    """

    name: str
    tokens: UInt[np.ndarray, " N"]
    starts: Int[np.ndarray, " M"]
    fingerprint: str

    def document(self, index: int) -> UInt[np.ndarray, " T"]:
        """Return the ids of a document, bos included."""
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.tokens)
        return self.tokens[self.starts[index] : end]


def load_tokens(
    source: str,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    *,
    field: str = "text",
    max_tokens: int | None = None,
    workers: int | None = None,
) -> TokenStore:
    """Return the tokens of a source, from the cache where they are there.

    Args:
        source: see `read_documents`; or files of ids, little-endian, that end in .u16, .u32 or these and .xz, in
            which each document begins with the tokenizer's bos.
        tokenizer: gives the ids.
        cache: the folder of all caches; None is `default_cache()`.
        field: the field of the text, where documents have fields.
        max_tokens: stop at the end of the document that reaches so many; None reads all.
        workers: processes that tokenise; None: one a core for large files, none for small ones.

    Raises:
        DataError: see `read_documents`; an id is not below the tokenizer's vocab_size; the disk is full or not
            writable; or a cache that is there is damaged.
    """
    if max_tokens is not None and max_tokens < 1:
        raise DataError(f"max_tokens={max_tokens} must be at least 1, or None to read all")
    key = {"format": FORMAT, "source": _describe(source), "tokenizer": tokenizer.fingerprint}
    key |= {"field": field, "max_tokens": max_tokens}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    folder = (default_cache() if cache is None else cache) / "tokens" / digest
    if not folder.exists():
        pieces = (
            _read_ids(source)
            if source.endswith(TOKEN_FILES)
            else _tokenise(source, tokenizer, field, workers)
        )
        _write(folder, source, tokenizer, pieces, max_tokens)
    return _open(folder, source)


def _describe(source: str) -> list[object]:
    if source.startswith(HUB):
        return [source]
    if source == PYTHON:
        return [source, platform.python_version()]
    stats = ((str(file.resolve()), file.stat()) for file in source_files(source))
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _read_ids(source: str) -> Pieces:
    for file in source_files(source):
        dtype = np.dtype("<u2" if ".u16" in file.suffixes else "<u4")
        try:
            with lzma.open(file) if file.suffix == ".xz" else file.open("rb") as stream:
                while content := stream.read(BLOCK):
                    if len(content) % dtype.itemsize:
                        raise DataError(f"{file} ends in the middle of an id; get it again")
                    yield np.frombuffer(content, dtype), len(content)
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"{file} cannot be read, or ends too early ({error}); get it again") from error


def _tokenise(source: str, tokenizer: Tokenizer, field: str, workers: int | None) -> Pieces:
    if workers is None:
        files = [] if source.startswith(HUB) or source == PYTHON else source_files(source)
        large = source.startswith(HUB) or sum(file.stat().st_size for file in files) >= PARALLEL_FROM
        workers = os.cpu_count() or 1 if large else 0
    batches = batched(read_documents(source, field), BATCH)
    if workers < 2:
        for texts in batches:
            yield from _encode(tokenizer, texts)
        return
    # Spawned, since a process that runs JAX has threads and must not be forked.
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (tokenizer.name,)) as pool:
        # A bounded number of batches at once: the pool alone would read ahead without limit.
        for group in batched(batches, 16 * workers):
            for encoded in pool.imap(_work, group):
                yield from encoded


_tokenizer: Tokenizer | None = None


def _start_worker(name: str) -> None:
    global _tokenizer
    _tokenizer = load_tokenizer(name)


def _work(texts: tuple[str, ...]) -> list[tuple[np.ndarray, int]]:
    assert _tokenizer is not None
    return _encode(_tokenizer, texts)


def _encode(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[tuple[np.ndarray, int]]:
    return [(np.array([tokenizer.bos, *tokenizer.encode(text)], np.uint32), len(text)) for text in texts]


@contextmanager
def _renamed_when_whole(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder` that takes its name at the end, or is removed at an error."""
    # No process number: those of two containers or hosts that share the folder may be the same.
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was quicker, with the same tokens
                raise
    except OSError as error:
        raise DataError(
            f"cannot write the cache {folder} ({error}); make room or give another folder"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(folder: Path, source: str, tokenizer: Tokenizer, pieces: Pieces, max_tokens: int | None) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    count, starts = 0, []
    with (
        _renamed_when_whole(folder) as part,
        Progress(f"tokenise {source}", 0, unit="characters") as progress,
    ):
        with (part / TOKENS).open("wb") as stream:
            for ids, amount in pieces:
                if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
                    raise DataError(
                        f"{source} has the id {ids.max()}, and the tokenizer {tokenizer.name} has only "
                        f"{tokenizer.vocab_size}; give the tokenizer that the ids were made with"
                    )
                starts.append(count + np.flatnonzero(ids == tokenizer.bos))
                if max_tokens is not None and count >= max_tokens:
                    break
                stream.write(ids.astype(dtype).tobytes())
                count += len(ids)
                progress.advance(amount)
            stream.flush()
            os.fsync(stream.fileno())
        positions = np.concatenate(starts) if starts else np.zeros(0, np.int64)
        positions = positions[positions < count]
        if not len(positions) or positions[0]:
            raise DataError(
                f"{source} has no text, or does not begin with the id {tokenizer.bos}, with which each document "
                "begins; give the tokenizer that the ids were made with"
            )
        (part / STARTS).write_bytes(positions.astype("<i8").tobytes())
        meta = {"format": FORMAT, "source": source, "tokenizer": tokenizer.fingerprint, "dtype": dtype.str}
        meta |= {"tokens": count, "crc32": {name: _crc32(part / name) for name in (TOKENS, STARTS)}}
        (part / META).write_text(json.dumps(meta))


def _open(folder: Path, source: str) -> TokenStore:
    damaged = f"the cache {folder} is damaged; delete that folder, and it is made again"
    try:
        meta = json.loads((folder / META).read_text())
        dtype, crcs = np.dtype(meta["dtype"]), meta["crc32"]
        for name in (TOKENS, STARTS):
            if _crc32(folder / name) != crcs[name]:
                raise DataError(f"{damaged} (wrong checksum of {name})")
        tokens = np.memmap(folder / TOKENS, dtype, "r")
        starts = np.fromfile(folder / STARTS, "<i8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{damaged} ({error})") from error
    return TokenStore(source, tokens, starts, f"{crcs[TOKENS]:08x}{crcs[STARTS]:08x}{len(tokens)}")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as stream:
        read: Callable[[], bytes] = partial(stream.read, BLOCK)
        for block in iter(read, b""):
            crc = zlib.crc32(block, crc)
    return crc
