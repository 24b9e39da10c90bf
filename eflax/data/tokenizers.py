"""Tokenizers: bytes, SentencePiece models, and tokenizer.json files of Hugging Face."""

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from eflax.data.download import RemoteFile, default_cache, fetch_all
from eflax.data.idx import DataError

MISTRAL = RemoteFile(
    "tokenizer.model.v1",
    "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
    (
        "https://raw.githubusercontent.com/mistralai/mistral-common/main/src/mistral_common/data/tokenizer.model.v1",
        "https://huggingface.co/mistralai/Mistral-7B-v0.1/resolve/main/tokenizer.model",
    ),
)
NAMES = ("bytes", "mistral-v1")


@runtime_checkable
class Tokenizer(Protocol):
    """Maps text to ids and back; special tokens are ids that no text gives."""

    name: str  # what `load_tokenizer` takes
    fingerprint: str  # changes with the ids that a text gives
    vocab_size: int
    bos: int  # begins every document
    eos: int | None  # ends an answer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special ones."""
        ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of ids; special ones give nothing, and bytes that are no UTF-8 give U+FFFD."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8, then 256, which begins documents, and 257, which ends answers."""

    name, fingerprint = "bytes", "bytes-1"
    vocab_size, bos = 258, 256
    eos: int | None = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of bytes."""
        return bytes(int(i) for i in ids if int(i) < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model file, such as Mistral's first (32,000 ids, bos 1, eos 2)."""

    def __init__(self, path: Path) -> None:
        content = _read(path)
        self._model: Any = _library("sentencepiece").SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"tokenizer {path} is no SentencePiece model ({error})") from error
        self.name, self.fingerprint = str(path), f"sentencepiece-{hashlib.sha256(content).hexdigest()}"
        self.vocab_size, self.bos = self._model.vocab_size(), self._model.bos_id()
        self.eos = None if self._model.eos_id() < 0 else self._model.eos_id()
        if self.bos < 0:
            raise DataError(f"tokenizer {path} has no id that begins a document (bos); use one that has")

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._model.encode(text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of ids."""
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A tokenizer.json; documents begin with the token <s>, <|endoftext|>, … that it has."""

    BOS = ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "[CLS]")
    EOS = ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[SEP]")

    def __init__(self, path: Path) -> None:
        content = _read(path)
        try:
            self._model: Any = _library("tokenizers").Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"tokenizer {path} is no readable tokenizer.json ({error})") from error
        self.name, self.fingerprint = str(path), f"huggingface-{hashlib.sha256(content).hexdigest()}"
        self.vocab_size = self._model.get_vocab_size(with_added_tokens=True)
        bos, self.eos = self._first(self.BOS), self._first(self.EOS)
        if bos is None:
            raise DataError(f"tokenizer {path} has none of {', '.join(self.BOS)} to begin a document with")
        self.bos = bos

    def _first(self, names: Sequence[str]) -> int | None:
        found = (self._model.token_to_id(name) for name in names)
        return next((i for i in found if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of ids."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(name: str, data_dir: Path | None = None) -> Tokenizer:
    """Return a tokenizer.

    Args:
        name: "bytes", "mistral-v1" (downloaded once and checked), or the path of a SentencePiece model or of a
            tokenizer.json.
        data_dir: cache folder of downloads; None is `default_cache()`.

    Raises:
        DataError: there is none, it is damaged, or the library for it is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "mistral-v1":
        way_out = f"give the path of {MISTRAL.name} instead; it is in the package mistral-common"
        (path,) = fetch_all([MISTRAL], (data_dir or default_cache()) / "tokenizers", way_out)
        return SentencePieceTokenizer(path)
    path = Path(name)
    if not path.is_file():
        raise DataError(f"tokenizer {name!r} is neither one of {', '.join(NAMES)} nor an existing file")
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read ({error})") from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"this needs the package {name}: pip install 'eflax[text]', or use the tokenizer 'bytes'"
        ) from error
