"""Image sets: what ships, local files, downloads from mirrors, damaged files; and the batches that training sees."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from eflax.data import DataError, image_batches, images, load_images
from eflax.data.download import RemoteFile, default_cache, fetch_all
from eflax.data.images import ARRAYS, DOWNLOADS, IDX_NAMES

RNG = np.random.default_rng(0)
SMALL = {
    "x_train": RNG.integers(0, 256, (20, 28, 28), np.uint8),
    "y_train": RNG.integers(0, 10, 20).astype(np.uint8),
    "x_test": RNG.integers(0, 256, (10, 28, 28), np.uint8),
    "y_test": RNG.integers(0, 10, 10).astype(np.uint8),
}


def to_idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_folder(folder: Path, packed: bool) -> Path:
    folder.mkdir()
    for key, name in zip(ARRAYS, IDX_NAMES, strict=True):
        content = to_idx(SMALL[key])
        (folder / (f"{name}.gz" if packed else name)).write_bytes(
            gzip.compress(content) if packed else content
        )
    return folder


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder that serves as the only reachable mirror of a small "mnist"; the first mirror is always dead."""
    folder = write_folder(tmp_path / "mirror", packed=True)
    files = tuple(
        RemoteFile(
            name,
            hashlib.sha256(to_idx(SMALL[key])).hexdigest(),
            ((tmp_path / "dead" / name).as_uri(), (folder / f"{name}.gz").as_uri()),
        )
        for key, name in zip(ARRAYS, IDX_NAMES, strict=True)
    )
    monkeypatch.setitem(images.DOWNLOADS, "mnist", files)
    return folder


def assert_small(data):
    for key, array in SMALL.items():
        np.testing.assert_array_equal(getattr(data, key), array)


def test_shipped_subset():
    data = load_images("mnist-small")
    assert data.x_train.shape == (10_000, 28, 28) and data.x_test.shape == (2_000, 28, 28)
    assert (
        np.bincount(data.y_train).tolist() == [1000] * 10 and np.bincount(data.y_test).tolist() == [200] * 10
    )
    folder = Path(images.__file__).parent
    digest = hashlib.sha256((folder / "mnist_small.npz").read_bytes()).hexdigest()
    assert digest in (folder / "mnist_small.md").read_text()


def test_local_files(tmp_path):
    np.savez_compressed(tmp_path / "own.npz", **SMALL)
    assert_small(load_images(str(tmp_path / "own.npz")))
    assert_small(load_images(str(write_folder(tmp_path / "plain", packed=False))))
    assert_small(load_images(str(write_folder(tmp_path / "packed", packed=True))))


def test_download_once_from_second_mirror(mirror, tmp_path):
    cache = tmp_path / "cache"
    assert_small(load_images("mnist", cache))
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(
        IDX_NAMES
    )  # no temporary files
    for file in mirror.iterdir():
        file.unlink()
    assert_small(load_images("mnist", cache))


def test_damaged_cache_is_downloaded_again(mirror, tmp_path):
    load_images("mnist", tmp_path)
    damaged = tmp_path / "mnist" / IDX_NAMES[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_small(load_images("mnist", tmp_path))


def test_offline_error_names_every_mirror_and_the_way_out(mirror, tmp_path):
    content = gzip.compress(b"something else")
    (mirror / f"{IDX_NAMES[0]}.gz").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_images("mnist", tmp_path / "cache")
    message = str(caught.value)
    assert "dead" in message and "wrong sha256" in message and "--dataset mnist-small" in message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("cut", [0, 5, -4])
def test_truncated_download_is_refused(mirror, tmp_path, cut):
    file = mirror / f"{IDX_NAMES[1]}.gz"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=IDX_NAMES[1]):
        load_images("mnist", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "mnist").iterdir()] == [IDX_NAMES[0]]


def test_downloads_have_several_mirrors():
    for files in DOWNLOADS.values():
        for file in files:
            assert len({url.split("/")[2] for url in file.urls}) >= 2 and len(file.sha256) == 64


def test_http_mirror(tmp_path, http_server):
    (http_server.folder / "file").write_bytes(gzip.compress(b"content"))
    file = RemoteFile(
        "file",
        hashlib.sha256(b"content").hexdigest(),
        (f"{http_server.url}/missing", f"{http_server.url}/file"),
    )
    assert fetch_all([file], tmp_path / "cache", "-")[0].read_bytes() == b"content"


@pytest.fixture
def http_server(tmp_path):
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from types import SimpleNamespace

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(folder=folder, url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_cache_respects_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "eflax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "eflax"


BAD_ARRAYS = {
    "missing key": ({"y_test": None}, "lacks y_test"),
    "flat images": ({"x_train": SMALL["x_train"].reshape(20, 784)}, "x_train must be uint8 of shape"),
    "float images": ({"x_test": SMALL["x_test"] / 255}, "x_test must be uint8"),
    "no images": ({"x_test": SMALL["x_test"][:0], "y_test": SMALL["y_test"][:0]}, "N ≥ 1"),
    "label count": ({"y_train": SMALL["y_train"][:-1]}, "y_train must be 20 integers"),
    "label range": ({"y_train": SMALL["y_train"] + np.uint8(7)}, "must lie in 0..9"),
    "float labels": ({"y_train": SMALL["y_train"] / 1.0}, "y_train must be 20 integers"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(tmp_path, case):
    change, message = BAD_ARRAYS[case]
    arrays = {key: array for key, array in {**SMALL, **change}.items() if array is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_images(str(tmp_path / "bad.npz"))


def damage_npz(path: Path, how: str) -> None:
    np.savez_compressed(path, **SMALL)
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped bits":
        content[3000:3010] = bytes(10)
        path.write_bytes(content)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not an array")
    elif how == "pickle":
        np.savez(path, **{**SMALL, "y_test": np.array([{}] * 10, object)})
    elif how == "npy":
        with path.open("wb") as stream:
            np.save(stream, SMALL["x_train"])


@pytest.mark.parametrize("how", ["truncated", "flipped bits", "empty", "text", "pickle", "npy"])
def test_damaged_npz(tmp_path, how):
    damage_npz(tmp_path / "bad.npz", how)
    with pytest.raises(DataError, match=r"bad\.npz"):
        load_images(str(tmp_path / "bad.npz"))


IDX_DAMAGE = {
    "cut": (lambda content: content[:-3], "the header announces"),
    "longer": (lambda content: content + b"x", "the header announces"),
    "empty but huge": (lambda content: content[:4] + bytes(4) + b"\xff" * 8, "the header announces"),
    "65 axes": (lambda content: content[:3] + bytes([65, *bytes(4 * 65)]), "the header announces"),
    "no header": (lambda content: content[:2], "not an idx file"),
    "empty": (lambda content: b"", "begins with nothing"),
    "floats": (lambda content: content[:2] + b"\x0d" + content[3:], "not an idx file of unsigned bytes"),
    "cut gzip": (lambda content: gzip.compress(content)[:-9], "damaged or cut short"),
}


@pytest.mark.parametrize("case", IDX_DAMAGE)
def test_damaged_idx(tmp_path, case):
    damage, message = IDX_DAMAGE[case]
    folder = write_folder(tmp_path / "idx", packed=False)
    (folder / IDX_NAMES[0]).write_bytes(damage((folder / IDX_NAMES[0]).read_bytes()))
    with pytest.raises(DataError, match=message):
        load_images(str(folder))


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="neither one of mnist-small, mnist, fashion-mnist nor an existing"):
        load_images(str(tmp_path / "nothing"))
    folder = write_folder(tmp_path / "idx", packed=True)
    (folder / f"{IDX_NAMES[3]}.gz").unlink()
    with pytest.raises(DataError, match=f"no file {IDX_NAMES[3]}"):
        load_images(str(folder))


def tagged(count: int):
    """Images whose first pixel is their row, with the row modulo 10 as label."""
    pictures = np.zeros((count, 28, 28), np.uint8)
    pictures[:, 0, 0] = np.arange(count)
    return pictures, (np.arange(count) % 10).astype(np.int32)


def test_an_epoch_has_every_image_once_and_keeps_the_rest():
    batches = image_batches(*tagged(50), batch_size=16, seed=3)
    epochs = []
    for _ in range(2):
        epoch = [next(batches) for _ in range(4)]
        assert [batch["weight"].sum() for batch in epoch] == [16, 16, 16, 2]
        assert {batch["pixels"].shape for batch in epoch} == {(16, 784)}
        rows = np.concatenate([batch["pixels"][batch["weight"] > 0, 0] for batch in epoch])
        labels = np.concatenate([batch["label"][batch["weight"] > 0] for batch in epoch])
        assert sorted(rows) == list(range(50)) and (labels == rows % 10).all()
        epochs.append(rows.tolist())
    assert epochs[0] != epochs[1]


def test_batches_follow_from_the_seed_and_resume_exactly():
    first, again, other = (image_batches(*tagged(50), batch_size=16, seed=seed) for seed in (3, 3, 4))
    for _ in range(5):
        assert (next(first)["pixels"] == next(again)["pixels"]).all()
    assert any((next(first)["pixels"] != next(other)["pixels"]).any() for _ in range(2))
    state = first.get_state()
    expected = [next(first)["pixels"] for _ in range(6)]
    resumed = image_batches(*tagged(50), batch_size=16, seed=3)
    resumed.set_state(state)
    assert all((next(resumed)["pixels"] == pixels).all() for pixels in expected)


def test_bad_batch_arguments():
    with pytest.raises(ValueError, match=r"batch_size must be in 1\.\.50"):
        image_batches(*tagged(50), batch_size=51, seed=0)
    with pytest.raises(ValueError, match="seed must not be negative"):
        image_batches(*tagged(50), batch_size=5, seed=-1)
