"""Documents from local files and Hugging Face data sets, one at a time."""

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, cast

from eflax.data.idx import DataError
from eflax.data.zst import open_zst

HUB = "hf:"
PYTHON = "python-topics"
TEXT = (".txt", ".md")
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz")
SUFFIXES = (*TEXT, *LINES, ".parquet", ".array_record")


def source_files(source: str) -> list[Path]:
    """Return the files of a source: a file, a folder, or a pattern such as "c4/*.jsonl.gz", in the order of names.

    Raises:
        DataError: there is none.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _some([file for file in path.rglob("*") if _has_suffix(file)], source)
    base = Path(path.anchor or ".")
    return _some([file for file in base.glob(str(path.relative_to(base))) if file.is_file()], source)


def read_documents(source: str, field: str = "text") -> Iterator[str]:
    """Yield the documents of a source that are not empty.

    Args:
        source: what `source_files` takes, of files that end in .txt or .md (a document each), .jsonl, .jsonl.gz or
            .jsonl.zst (a document a line), .parquet, or .array_record (UTF-8 text or tf.train.Example); or
            "python-topics", the language reference that Python brings along (700 kB); or
            "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT" for a data set of the Hugging Face hub, streamed.
        field: the field of the text, where documents have fields.

    Raises:
        DataError: a file is missing, empty, damaged or not UTF-8, or lacks the field; the message says where.
    """
    if source.startswith(HUB):
        yield from _hub(source, field)
        return
    if source == PYTHON:
        yield from importlib.import_module("pydoc_data.topics").topics.values()
        return
    for file in source_files(source):
        empty = True
        for text in _file(file, field):
            empty = False
            if text:
                yield text
        if empty:
            raise DataError(f"{file} is empty; remove it from the data or get it again")


def _has_suffix(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) or ".array_record-" in path.name


def _some(files: list[Path], source: str) -> list[Path]:
    if not files:
        raise DataError(
            f"there is no file {source} (and no folder or pattern with any {', '.join(SUFFIXES)})"
        )
    return sorted(files)


def _file(path: Path, field: str) -> Iterator[str]:
    name = path.name
    try:
        if name.endswith(TEXT):
            if content := path.read_bytes():
                yield _decode(content, str(path))
        elif name.endswith(LINES):
            yield from _lines(path, field)
        elif name.endswith(".parquet"):
            yield from _parquet(path, field)
        elif ".array_record" in name:
            yield from _array_record(path, field)
        else:
            raise DataError(f"{path}: the end of its name is none of {', '.join(SUFFIXES)}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, or ends too early ({error}); get it again") from error


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {error.start}); convert it, for instance with iconv"
        ) from error


def _lines(path: Path, field: str) -> Iterator[str]:
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                yield ""
                continue
            try:
                row = json.loads(_decode(line, where))
            except (ValueError, RecursionError) as error:
                raise (
                    error if isinstance(error, DataError) else DataError(f"{where}: no JSON ({error})")
                ) from error
            yield _text(row, field, where)


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix != ".zst":
        return path.open("rb")
    return cast(BinaryIO, open_zst(path, _library("zstandard", "text")))


def _parquet(path: Path, field: str) -> Iterator[str]:
    parquet = _library("pyarrow.parquet", "text")
    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise DataError(f"{path} has no column {field!r} but {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(columns=[field]):
            for row in batch.to_pylist():
                yield _text(row, field, str(path))
    except DataError:
        raise
    except Exception as error:  # Arrow has its own
        raise DataError(f"{path} is no readable parquet file ({error}); get it again") from error


def _array_record(path: Path, field: str) -> Iterator[str]:
    grain = importlib.import_module("grain")
    try:
        records = grain.sources.ArrayRecordDataSource([str(path)])
        count = len(records)
    except Exception as error:
        raise DataError(f"{path} is no readable ArrayRecord file ({error}); get it again") from error
    for index in range(count):
        where = f"{path}, record {index}"
        try:
            record = records[index]
        except Exception as error:
            raise DataError(f"{where}: cannot be read ({error}); get the file again") from error
        features = _example(record)
        yield _decode(record, where) if features is None else _text(features, field, where)


def _example(record: bytes) -> dict[str, str] | None:
    """Return the features of a serialised tf.train.Example that hold one UTF-8 string; None if it is none.

    Example { 1: Features { 1: map of { 1: name, 2: Feature { 1: BytesList { 1: value } } } } } in protocol buffers.
    """
    try:
        features = {}
        for example in _fields(record):
            for entry in _fields(example):
                name, feature = _fields(entry)
                values = [value for kind in _fields(feature) for value in _fields(kind)]
                features[name.decode()] = b"".join(values).decode()
        return features
    except (ValueError, IndexError):
        return None


def _fields(message: bytes) -> list[bytes]:
    """Return the length-delimited fields of a message that has no others."""
    fields, at = [], 0
    while at < len(message):
        tag, at = _varint(message, at)
        size, at = _varint(message, at)
        if tag & 7 != 2 or at + size > len(message):
            raise ValueError("not of such fields")
        fields.append(message[at : at + size])
        at += size
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while message[at] & 128:
        value |= (message[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return value | message[at] << shift, at + 1


def _hub(source: str, field: str) -> Iterator[str]:
    name, *rest = source.removeprefix(HUB).split(":")
    config, split = (None, "train") if not rest else (rest[0] if rest[1:] else None, rest[-1])
    datasets = _library("datasets", "text")
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the library has dozens
        raise DataError(f"{source}: cannot be loaded ({error}); check name, split and network") from error
    number = 0
    try:
        for number, row in enumerate(rows):
            yield _text(row, field, f"{source}, row {number}")
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{source}: ends after row {number} ({error}); check the network, and try again"
        ) from error


def _text(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        names = ", ".join(row) if isinstance(row, dict) else repr(row)[:40]
        raise DataError(
            f"{where}: no text in the field {field!r} (there is {names}); name the field of the text"
        )
    try:
        row[field].encode()
    except UnicodeEncodeError as error:  # JSON can write half of a character
        raise DataError(
            f"{where}: character {error.start} is a lone surrogate, which no encoding has; repair or drop the document"
        ) from error
    return row[field]


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"this needs the package {name}: pip install 'eflax[{extra}]'") from error
