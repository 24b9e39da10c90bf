"""Text: sources, tokenizers, the cache, windows and batches."""

import dataclasses
import gzip
import json
import lzma
import os

import numpy as np
import pytest

from eflax.data import DataError, text_cache
from eflax.data.packing import Windows, text_batches
from eflax.data.text_cache import load_tokens
from eflax.data.text_sources import read_documents
from eflax.data.tokenizers import ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()
TEXTS = ["One day.", "Zwölf Boxkämpfer", "x" * 50]


def example(text):
    """A tf.train.Example with the features url and text."""

    def field(content, number=1):
        size, digits = len(content), []
        while size > 127:
            digits, size = [*digits, size & 127 | 128], size >> 7
        return bytes([number << 3 | 2, *digits, size]) + content

    entries = {b"url": b"http://x", b"text": text.encode()}
    return field(b"".join(field(field(k) + field(field(field(v)), 2)) for k, v in entries.items()))


def write(folder, kind):
    path = folder / f"data.{kind}"
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS).encode()
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        return folder
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines, mtime=0))
    elif kind == "jsonl.zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(lines))
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": TEXTS}), path)
    else:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for text in TEXTS:
            writer.write(example(text))
        writer.close()
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record"])
def test_every_kind_of_file_gives_its_documents(tmp_path, kind):
    assert list(read_documents(str(write(tmp_path, kind)))) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"caf\xe9", r"a.txt is not UTF-8 \(byte 3\); convert it"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl, line 2: no JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1: no text in the field 'text' \(there is body\)"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 999, mtime=0)[:-20], "ends too early"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', "line 1: character 1 is a lone surrogate"),
        ("a.jsonl", b"[" * 200_000, "line 1: no JSON"),
        ("a.jsonl.zst", b"garbage", "cannot be read"),
        ("a.doc", b"x", "the end of its name is none of"),
        ("a.array_record", b"x" * 100, "no readable ArrayRecord file"),
    ],
)
def test_bad_files_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(str(tmp_path / name)))


def test_a_cut_zst_file_is_told_even_where_a_line_ends(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    whole, path = zstandard.compress(b'{"text": "x"}\n' * 9), tmp_path / "a.jsonl.zst"
    path.write_bytes(whole * 2)
    assert len(list(read_documents(str(path)))) == 18
    path.write_bytes(whole + whole[:-4])
    with pytest.raises(DataError, match=r"ends too early \(the last zstd frame is not whole\); get it again"):
        list(read_documents(str(path)))


def test_missing_files_and_tokenizers_are_told(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        list(read_documents(str(tmp_path / "none" / "*.jsonl")))
    with pytest.raises(DataError, match="neither one of bytes, mistral-v1 nor an existing file"):
        load_tokenizer("mistral")
    (tmp_path / "x.model").write_bytes(b"x")
    pytest.importorskip("sentencepiece")
    with pytest.raises(DataError, match="no SentencePiece model"):
        load_tokenizer(str(tmp_path / "x.model"))


def test_bytes_there_and_back():
    ids = BYTES.encode(TEXTS[1])
    assert BYTES.decode([BYTES.bos, *ids]) == TEXTS[1]
    assert max(ids) < BYTES.vocab_size


def test_tokenizer_json_there_and_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.encode("abb"), tokenizer.bos, tokenizer.vocab_size) == ([3, 2], 0, 4)


@pytest.fixture
def store(tmp_path):
    return load_tokens(str(write(tmp_path, "jsonl")), BYTES, tmp_path / "cache")


def test_cache_holds_all_documents_and_is_made_once(store, tmp_path):
    assert [BYTES.decode(store.document(i)) for i in range(3)] == TEXTS
    assert all(store.document(i)[0] == BYTES.bos for i in range(3))
    (made,) = (tmp_path / "cache" / "tokens").iterdir()
    before = (made / "meta.json").stat().st_mtime_ns
    again = load_tokens(str(tmp_path / "data.jsonl"), BYTES, tmp_path / "cache")
    assert again.fingerprint == store.fingerprint and (made / "meta.json").stat().st_mtime_ns == before
    few = load_tokens(str(tmp_path / "data.jsonl"), BYTES, tmp_path / "other", max_tokens=20)
    assert len(few.starts) == 2


def test_processes_that_tokenise_together_keep_the_order(store, tmp_path, monkeypatch):
    monkeypatch.setattr(text_cache, "BATCH", 1)
    source = str(tmp_path / "data.jsonl")
    parallel = load_tokens(source, BYTES, tmp_path / "other", workers=2)
    assert parallel.fingerprint == store.fingerprint
    np.testing.assert_array_equal(parallel.tokens, store.tokens)


def test_data_sets_of_the_hub_are_streamed(tmp_path):
    """Files and columns as SlimPajama has them, in a folder, which the library takes like a name on the hub."""
    zstandard = pytest.importorskip("zstandard")
    for split, texts in (("train", TEXTS), ("validation", TEXTS[:1])):
        folder = tmp_path / "pajama" / split / "chunk1"
        folder.mkdir(parents=True)
        rows = ({"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}} for text in texts)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"example_{split}_0.jsonl.zst").write_bytes(zstandard.compress(content))
    source = f"hf:{tmp_path / 'pajama'}"
    assert list(read_documents(source)) == TEXTS
    assert list(read_documents(f"{source}:validation")) == TEXTS[:1]
    few = load_tokens(source, BYTES, tmp_path / "cache", max_tokens=5, workers=0)
    assert few.tokens.tolist() == [BYTES.bos, *BYTES.encode(TEXTS[0])]
    with pytest.raises(DataError, match=r"cannot be loaded .*check name, split"):
        list(read_documents(f"{source}:holidays"))
    with pytest.raises(DataError, match=r"row 0: no text in the field 'content' \(there is text, meta\)"):
        list(read_documents(source, "content"))


def test_what_another_process_writes_is_left_alone(store, tmp_path):
    """Two containers share a cache, and both are process 1 of theirs."""
    folder, pid = next((tmp_path / "cache" / "tokens").iterdir()), os.getpid()
    other = tmp_path / "other" / "tokens" / f"{folder.name}.{pid}.part"
    other.mkdir(parents=True)
    again = load_tokens(str(tmp_path / "data.jsonl"), BYTES, tmp_path / "other")
    assert again.fingerprint == store.fingerprint and other.is_dir()
    with pytest.raises(DataError, match="max_tokens=0 must be at least 1"):
        load_tokens(str(tmp_path / "data.jsonl"), BYTES, tmp_path / "other", max_tokens=0)


@pytest.mark.parametrize("damage", ["cut", "flip", "meta"])
def test_damaged_cache_is_refused(store, tmp_path, damage):
    (made,) = (tmp_path / "cache" / "tokens").iterdir()
    content = bytearray((made / "tokens.bin").read_bytes())
    if damage == "meta":
        (made / "meta.json").write_text("{")
    elif damage == "cut":
        (made / "tokens.bin").write_bytes(content[:-2])
    else:
        content[5] ^= 1
        (made / "tokens.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"cache .* is damaged; delete that folder"):
        load_tokens(str(tmp_path / "data.jsonl"), BYTES, tmp_path / "cache")


def test_an_error_leaves_no_cache_behind(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 100 + "{")
    with pytest.raises(DataError, match="line 101"):
        load_tokens(str(tmp_path / "a.jsonl"), BYTES, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the cache"):
        load_tokens(str(write(tmp_path, "jsonl.gz")), BYTES, tmp_path / "file")


def test_files_of_ids(tmp_path):
    ids = np.array([256, 1, 2, 256, 3], "<u2")
    path = tmp_path / "x.u16.xz"
    path.write_bytes(lzma.compress(ids.tobytes()))
    store = load_tokens(str(path), BYTES, tmp_path / "cache")
    np.testing.assert_array_equal(store.tokens, ids)
    np.testing.assert_array_equal(store.starts, [0, 3])
    for bad, message in [
        (np.array([256, 258], "<u2"), "has the id 258, and the tokenizer bytes has only 258"),
        (np.array([1, 256], "<u2"), "does not begin with the id 256"),
    ]:
        path.write_bytes(lzma.compress(bad.tobytes()))
        with pytest.raises(DataError, match=message):
            load_tokens(str(path), BYTES, tmp_path / "cache")


def test_windows_predict_every_token_but_the_first_of_a_document_once(store):
    windows = Windows(store, 7, remainder=True)
    targets = np.concatenate([window["targets"][window["weight"] > 0] for window in windows])
    first = np.isin(np.arange(len(store.tokens)), store.starts)
    np.testing.assert_array_equal(targets, store.tokens[~first])
    number = np.searchsorted(store.starts, np.arange(len(store.tokens)), "right")
    for index in range(len(windows)):
        window = windows[index]
        expected = number[index * 7 : index * 7 + 7]
        np.testing.assert_array_equal(np.diff(window["segment_ids"])[: len(expected) - 1], np.diff(expected))
    joined = Windows(store, 7, separate=False)
    assert all(window["weight"].all() and "segment_ids" not in window for window in joined)


def test_a_store_of_nothing_but_first_tokens_is_refused(store):
    alone = dataclasses.replace(store, starts=np.arange(len(store.tokens)))
    with pytest.raises(DataError, match="no document of two tokens"):
        Windows(alone, 7)
    assert len(Windows(alone, 7, separate=False)) == len(Windows(store, 7))


def read(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_batches_depend_on_the_step_alone(store):
    options = {"length": 5, "batch_size": 4, "seed": 3, "weights": [1.0, 2.0]}
    whole = read(text_batches([store, store], **options), 6)
    parts = [text_batches([store, store], **options, rows=[2 * p, 2 * p + 1]) for p in (0, 1)]
    halves = [read(part, 2) for part in parts]
    resumed = [text_batches([store, store], **options, rows=[p]) for p in range(4)]
    for part in resumed:
        part.set_state(json.loads(json.dumps(parts[0].get_state())))
    quarters = [read(part, 4) for part in resumed]
    for name in whole[0]:
        for step, batch in enumerate(whole):
            rows = (
                [half[step] for half in halves] if step < 2 else [quarter[step - 2] for quarter in quarters]
            )
            np.testing.assert_array_equal(np.concatenate([row[name] for row in rows]), batch[name])


def test_an_epoch_has_every_window_once_and_the_next_another_order(store):
    windows = Windows(store, 5)
    count = len(windows)
    rows = [batch["tokens"][0].tobytes() for batch in read(text_batches([store], 5, 1, 0), 2 * count)]
    expected = sorted(window["tokens"].tobytes() for window in windows)
    assert sorted(rows[:count]) == sorted(rows[count:]) == expected
    assert rows[:count] != rows[count:]


def test_mixtures_keep_their_weights_and_impossible_ones_are_refused(store, tmp_path):
    (tmp_path / "z.txt").write_text("z" * 200)
    other = load_tokens(str(tmp_path / "z.txt"), BYTES, tmp_path / "cache")
    rows = [
        batch["tokens"][0] for batch in read(text_batches([store, other], 5, 1, 0, weights=[3.0, 1.0]), 40)
    ]
    assert sum(int((row == ord("z")).any()) for row in rows) == 10
    for options, message in [
        ({"weights": [1.0, np.nan]}, "there must be a positive one"),
        ({"rows": [1, 2]}, r"some of 0\.\.1"),
        ({"length": 1000}, "too few for a window of 1000"),
    ]:
        with pytest.raises((DataError, ValueError), match=message):
            text_batches([store, other], **({"length": 5, "batch_size": 2, "seed": 0} | options))
