"""Memory-mapped image cache on disk, decoded and resized once per content and size, shared by all processes.

ROOT/KEY/pixels.bin  uint8, (images, channels, size, size)
    labels.bin       int64, the class of each image, as an index into the sorted names
    digests.bin      uint64, first 8 bytes of the SHA-256 of each file
    meta.json        sizes of all these files, and the names of the classes; written last
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normlab.data.cache import built, key_of, new_folder
from normlab.errors import NormLabError
from normlab.utils.files import write_atomically
from normlab.utils.lazy import import_optional

FORMAT = 2
SUFFIXES = (".png", ".jpg", ".jpeg")
_MODES = {1: "L", 3: "RGB"}
_AT_A_TIME = 256


@dataclass(frozen=True)
class ImageCache:
    """Memory-mapped labelled images; images with equal `digests` are equal."""

    key: str
    pixels: np.ndarray
    labels: np.ndarray
    digests: np.ndarray
    classes: tuple[str, ...]


def cached_images(folders: Sequence[Path], size: int, channels: int, root: Path, *, progress: bool) -> ImageCache:
    """Open the cache of the images in folders, one class per subfolder; builds it if missing or incomplete."""
    if channels not in _MODES:
        raise NormLabError(f"images in files have 1 channel (grey) or 3 (colour), got channels={channels}; try 3")
    files = [found for folder in folders for found in _files(folder)]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(lambda file: _digest(file[1]), files))
    names = [f"{kind}/{path.name}" for kind, path in files]
    key = key_of(FORMAT, "images", size, channels, names, [digest.hex() for digest in digests])

    def build(path: Path) -> None:
        _build(files, digests, size, channels, path)

    return built(root / key, lambda path: _open(path, size, channels), build, progress=progress, kind="image")


def _files(folder: Path) -> list[tuple[str, Path]]:
    """(class, file) pairs sorted by name, without hidden files."""
    if not folder.is_dir():
        raise NormLabError(
            f"there is no folder {str(folder)!r}; expected 'digits', or a folder with one for every class"
        )
    kinds = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(kind.name, path) for kind in kinds for path in sorted(kind.rglob("*")) if _is_image(path)]
    if not found:
        raise NormLabError(f"{folder} holds no images; expected {folder.name}/CLASS/*.png, with {' '.join(SUFFIXES)}")
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _digest(path: Path) -> bytes:
    return hashlib.sha256(_read(path)).digest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NormLabError(f"{path}: cannot be read: {error.strerror}") from None


def _build(files: Sequence[tuple[str, Path]], digests: Sequence[bytes], size: int, channels: int, path: Path) -> None:
    classes = sorted({kind for kind, _ in files})
    places = {kind: number for number, kind in enumerate(classes)}
    index = {
        "labels": np.array([places[kind] for kind, _ in files], np.int64),
        "digests": np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64),
    }
    with new_folder(path) as part:
        _write_pixels(files, digests, size, channels, part / "pixels.bin")
        for name, array in index.items():
            write_atomically(part / f"{name}.bin", array.tobytes())
        sizes = {name: (part / name).stat().st_size for name in ("pixels.bin", "labels.bin", "digests.bin")}
        write_atomically(part / "meta.json", json.dumps({"sizes": sizes, "classes": classes}, indent=1))


def _write_pixels(
    files: Sequence[tuple[str, Path]], digests: Sequence[bytes], size: int, channels: int, path: Path
) -> None:
    pillow, arrange = (import_optional(name, "vision", "reading images") for name in ("PIL.Image", "PIL.ImageOps"))

    def pixels(number: int) -> bytes:
        _, file = files[number]
        raw = _read(file)
        # The key belongs to the content at the time of hashing.
        if hashlib.sha256(raw).digest() != digests[number]:
            raise NormLabError(f"{file}: changed while it was being read; try again when it is complete")
        return _resized(file, raw, size, channels, pillow, arrange)

    with open(path, "wb") as out, ThreadPoolExecutor() as pool:
        for start in range(0, len(files), _AT_A_TIME):
            for image in pool.map(pixels, range(start, min(start + _AT_A_TIME, len(files)))):
                out.write(image)
        out.flush()
        os.fsync(out.fileno())


def _resized(file: Path, raw: bytes, size: int, channels: int, pillow, arrange) -> bytes:
    """Decode an image, apply its orientation, crop the central square and resize it."""
    try:
        with pillow.open(io.BytesIO(raw)) as image:
            upright = _eight_bits(arrange.exif_transpose(image), pillow).convert(_MODES[channels])
            square = arrange.fit(upright, (size, size), pillow.Resampling.BICUBIC)
    except Exception as error:  # the package raises whatever its many readers raise
        # Pillow's message for unknown formats only names the memory buffer.
        unknown = isinstance(error, pillow.UnidentifiedImageError)
        reason = "no known format" if unknown else next(iter(str(error).splitlines()), type(error).__name__)
        raise NormLabError(f"{file}: not an image that can be read ({reason}); remove it or mend it") from None
    return np.asarray(square, np.uint8).reshape(size, size, channels).transpose(2, 0, 1).tobytes()


def _eight_bits(image, pillow):
    """Grey of 16 bits as 8: Pillow's own conversion clips at 255, which makes nearly every pixel white."""
    if not image.mode.startswith("I"):
        return image
    return pillow.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))


def _open(path: Path, size: int, channels: int) -> ImageCache | None:
    """Open the cache at `path`; None if it is missing or a file does not have its recorded size."""
    kinds = {"pixels": np.uint8, "labels": np.int64, "digests": np.uint64}
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if any((path / name).stat().st_size != length for name, length in meta["sizes"].items()):
            return None
        classes = tuple(map(str, meta["classes"]))
        arrays = {name: np.asarray(np.memmap(path / f"{name}.bin", kind, mode="r")) for name, kind in kinds.items()}
        arrays["pixels"] = arrays["pixels"].reshape(-1, channels, size, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return ImageCache(key=path.name, classes=classes, **arrays)
