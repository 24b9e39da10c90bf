"""MNIST-like image sets: the subset that ships with the package, full sets by download, and local files."""

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from eflax.data.download import RemoteFile, default_cache, fetch_all
from eflax.data.idx import DataError, parse_idx

SIDE = 28
CLASSES = 10
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

_SOURCES = {
    "mnist": (
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    "fashion-mnist": (
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
}
DOWNLOADS = {
    name: tuple(
        RemoteFile(file, sha256, tuple(f"{mirror}{file}.gz" for mirror in mirrors))
        for file, sha256 in zip(IDX_NAMES, digests, strict=True)
    )
    for name, (mirrors, digests) in _SOURCES.items()
}
NAMES = ("mnist-small", *DOWNLOADS)


@dataclass(frozen=True)
class ImageSet:
    """Images of 28 × 28 pixels, 0 black to 255 white, with labels 0 to 9, in a training and a test part."""

    name: str
    x_train: UInt8[np.ndarray, "N 28 28"]
    y_train: Int[np.ndarray, " N"]
    x_test: UInt8[np.ndarray, "M 28 28"]
    y_test: Int[np.ndarray, " M"]

    def fingerprint(self) -> str:
        """Return a sha256 over all four arrays, to recognise the same data again."""
        digest = hashlib.sha256()
        for array in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def load_images(dataset: str, data_dir: Path | None = None) -> ImageSet:
    """Load an image set.

    Args:
        dataset: "mnist-small" (ships with the package), "mnist" or "fashion-mnist" (downloaded once), or
            the path of an npz file with x_train, y_train, x_test, y_test or of a folder with the four idx
            or idx.gz files.
        data_dir: cache folder of downloads; None is `default_cache()`.

    Raises:
        DataError: the file or folder is missing, damaged, or holds something else than 28 × 28 images and
            labels 0 to 9; or no mirror could be reached.
    """
    if dataset == "mnist-small":
        with resources.as_file(resources.files("eflax.data") / "mnist_small.npz") as path:
            arrays = _read_npz(path)
    elif dataset in DOWNLOADS:
        folder = (data_dir or default_cache()) / dataset
        way_out = (
            f"use --dataset mnist-small, or --dataset PATH with a local npz or idx copy, "
            f"or put the unpacked idx files into {folder}"
        )
        paths = fetch_all(DOWNLOADS[dataset], folder, way_out)
        arrays = {
            key: parse_idx(path.read_bytes(), str(path)) for key, path in zip(ARRAYS, paths, strict=True)
        }
    else:
        arrays = _read_local(Path(dataset))
    _check(arrays, dataset)
    labels = {key: arrays[key].astype(np.int32) for key in ("y_train", "y_test")}
    return ImageSet(name=dataset, x_train=arrays["x_train"], x_test=arrays["x_test"], **labels)


def _read_local(path: Path) -> dict[str, np.ndarray]:
    if path.is_dir():
        return {key: _read_idx(path, name) for key, name in zip(ARRAYS, IDX_NAMES, strict=True)}
    if path.is_file():
        return _read_npz(path)
    raise DataError(
        f"dataset {str(path)!r} is neither one of {', '.join(NAMES)} nor an existing file or folder"
    )


def _read_idx(folder: Path, name: str) -> np.ndarray:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return parse_idx(path.read_bytes(), str(path))
    raise DataError(f"dataset folder {folder} has no file {name} or {name}.gz")


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as stream:  # which NumPy would leave open if the file is damaged
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"dataset {path} holds a single array, not an npz with {', '.join(ARRAYS)}")
            missing = [key for key in ARRAYS if key not in archive]
            if missing:
                raise DataError(
                    f"dataset {path} lacks {', '.join(missing)}; it has {', '.join(archive) or 'nothing'}"
                )
            arrays = {key: archive[key] for key in ARRAYS}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("a member is no array")
            return arrays
    except DataError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise DataError(
            f"dataset {path} is not a readable npz file ({error}); get or write it again"
        ) from error


def _check(arrays: dict[str, np.ndarray], dataset: str) -> None:
    for part in ("train", "test"):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if (
            images.ndim != 3
            or images.shape[1:] != (SIDE, SIDE)
            or images.dtype != np.uint8
            or not len(images)
        ):
            raise DataError(
                f"dataset {dataset}: x_{part} must be uint8 of shape [N, {SIDE}, {SIDE}] with N ≥ 1, "
                f"got {images.dtype} {images.shape}"
            )
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise DataError(
                f"dataset {dataset}: y_{part} must be {len(images)} integers, "
                f"got {labels.dtype} {labels.shape}"
            )
        if labels.min() < 0 or labels.max() >= CLASSES:
            raise DataError(
                f"dataset {dataset}: y_{part} must lie in 0..{CLASSES - 1}, "
                f"got {labels.min()}..{labels.max()}"
            )
