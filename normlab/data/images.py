"""Image classification data: scikit-learn's handwritten digits, or folders of image files.

images = prepare_images(["digits"], size=8, channels=1)      # or folders with one folder for every class
with BatchLoader(ImageSamples(images.train, seed=0), batch=64) as loader:
    for batch in loader:                                     # endless: batch.inputs, batch.targets
        ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normlab.data.cache import cache_root, key_of
from normlab.data.corpus import held_out
from normlab.data.image_cache import ImageCache, cached_images
from normlab.errors import NormLabError
from normlab.utils.lazy import import_optional

_DIGITS = "digits"
_LEVELS = 16
"""Grey levels of scikit-learn's digits."""


@dataclass(frozen=True)
class Images:
    """One split of a data set: a selection of images (N, C, S, S) of bytes, with labels."""

    pixels: np.ndarray
    labels: np.ndarray
    chosen: np.ndarray
    """Indices of the selected images."""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(pixels as bytes, labels) of the images with these indices."""
        places = self.chosen[which]
        return self.pixels[places], self.labels[places]

    def facts(self) -> dict[str, Any]:
        """A summary for reports, ready for JSON."""
        return {"images": len(self)}


@dataclass(frozen=True)
class ImageSet:
    """Training and validation images without a common image, and the names of the classes."""

    train: Images
    val: Images
    classes: tuple[str, ...]
    source: str

    @property
    def fingerprint(self) -> str:
        """A hash; equal for two sets with the same images in the same splits."""
        return key_of(self.train.fingerprint, self.val.fingerprint)

    def facts(self) -> dict[str, Any]:
        """A summary for reports, ready for JSON."""
        sides = {"train": self.train.facts(), "val": self.val.facts()}
        return {"source": self.source, "fingerprint": self.fingerprint, "classes": list(self.classes), **sides}

    def describe(self) -> str:
        """A summary in one line."""
        return f"{self.source}; {len(self.classes)} classes; train {len(self.train):,}; validation {len(self.val):,}"


def prepare_images(
    data: Sequence[str],
    *,
    size: int,
    channels: int,
    val_data: Sequence[str] = (),
    val_fraction: float = 0.2,
    cache: Path | None = None,
    progress: bool = True,
) -> ImageSet:
    """Load the images of `data`, `size` pixels wide and high, split into training and validation.

    `digits` is scikit-learn's set of 1797 handwritten digits, 8 × 8 in grey; anything else is a folder with a subfolder
    of .png or .jpg files for every class. The split of an image depends on its content alone, as for text
    (`corpus.prepare`), so that copies stay together. With `val_data` nothing is split, and images that occur in both
    are removed from training.
    """
    if not val_data and not 0.0 < val_fraction < 1.0:
        raise NormLabError(f"val_fraction must lie between 0 and 1, got {val_fraction}; try 0.2 or name val_data")
    root = cache_root(cache)
    found = _open(data, size, channels, root, progress)
    if not val_data:
        return _split(found, val_fraction, _source(data, found))
    apart = _open(val_data, size, channels, root, progress)
    if strange := sorted(set(apart.classes) - set(found.classes)):
        raise NormLabError(f"val_data has a class {strange[0]!r} that data does not have; both need the same folders")
    train = _side(found, ~np.isin(found.digests, apart.digests), "train", apart.key)
    if not len(train):
        raise NormLabError("every image of data is in val_data too: nothing is left to train on; name other folders")
    # The classes are those of the training data; the validation data may lack some.
    places = np.array([found.classes.index(name) for name in apart.classes])
    val = Images(apart.pixels, places[apart.labels], np.arange(len(apart.labels)), key_of(apart.key, "val"))
    return ImageSet(train, val, found.classes, _source(data, found))


def _open(data: Sequence[str], size: int, channels: int, root: Path, progress: bool) -> ImageCache:
    if isinstance(data, str) or not data:
        raise NormLabError("no data given; expected ['digits'] or folders with a folder of images for every class")
    if _DIGITS not in data:
        folders = [Path(name).expanduser() for name in data]
        return cached_images(folders, size, channels, root, progress=progress)
    if len(data) > 1:
        raise NormLabError(f"{_DIGITS!r} stands alone: its classes are no folders; name it or folders, not both")
    return _digits(size, channels)


def _digits(size: int, channels: int) -> ImageCache:
    found = import_optional("sklearn.datasets", "vision", "data 'digits'").load_digits()
    ink = found.images.astype(np.uint8)
    if (size, channels) != (ink.shape[1], 1):
        raise NormLabError(
            f"{_DIGITS!r} are images of 8 × 8 in grey, the model's of {size} × {size} with {channels} channels; "
            "leave out image_size and channels, or name a folder of images"
        )
    pixels = (ink * (255 / _LEVELS)).round().astype(np.uint8)[:, None]
    digests = [int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big") for image in pixels]
    labels, names = found.target.astype(np.int64), tuple(map(str, found.target_names))
    content = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    return ImageCache(key_of(_DIGITS, content), pixels, labels, np.array(digests, np.uint64), names)


def _split(found: ImageCache, fraction: float, source: str) -> ImageSet:
    if len(np.unique(found.digests)) == 1:
        raise NormLabError("all images are the same: nothing can be held out; name other data or val_data")
    apart = held_out(found.digests, fraction)
    # The number of held-out images determines which ones: those with the lowest digests.
    count = str(apart.sum())
    return ImageSet(_side(found, ~apart, "train", count), _side(found, apart, "val", count), found.classes, source)


def _side(found: ImageCache, chosen: np.ndarray, *names: str) -> Images:
    return Images(found.pixels, found.labels, np.flatnonzero(chosen), key_of(found.key, *names))


def _source(data: Sequence[str], found: ImageCache) -> str:
    return f"{', '.join(data)}: {len(found.labels):,} images of {found.pixels.shape[-1]} × {found.pixels.shape[-2]}"
