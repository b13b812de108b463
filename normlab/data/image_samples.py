"""Image samples: shuffled and augmented for training, every image once for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from normlab.data.batch_loader import IGNORED, Batch, check_places, to_device
from normlab.data.images import Images
from normlab.data.windows import mix_hash, shuffled


class ImageSamples:
    """The training images of all epochs, in an order determined by `seed` alone.

    Augmentation: `shift` moves an image by up to so many pixels in each direction, `flip` mirrors it with probability
    1/2. Both depend only on the seed and the sample's number.
    """

    def __init__(self, images: Images, *, seed: int, shift: int = 0, flip: bool = False):
        self._images, self._seed, self._shift, self._flip = images, seed, shift, flip
        self.per_epoch = len(images)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    @property
    def identity(self) -> Mapping[str, Any]:
        known = {"seed": self._seed, "shift": self._shift, "flip": self._flip}
        return {**known, "fingerprint": self._images.fingerprint}

    def read(self, first: int, count: int) -> Batch:
        numbers = np.arange(first, first + count)
        pixels, labels = self._images.read(np.array([self._place(number) for number in numbers.tolist()]))
        return _batch(self._changed(pixels, numbers), labels)

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self.per_epoch, self._seed, epoch, "images")
        return int(self._order[index])

    def _changed(self, pixels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        chance = mix_hash("augment", self._seed, numbers.astype(np.uint64))
        if self._flip:
            mirrored = (chance & np.uint64(1)).astype(bool)
            pixels = np.where(mirrored[:, None, None, None], pixels[..., ::-1], pixels)
        if self._shift:
            steps = np.uint64(2 * self._shift + 1)
            down, right = (((chance >> np.uint64(k)) & np.uint64(0xFFFF)) % steps for k in (8, 32))
            pixels = _shifted(pixels, down.astype(np.int64), right.astype(np.int64), self._shift)
        return pixels


def _shifted(pixels: np.ndarray, down: np.ndarray, right: np.ndarray, most: int) -> np.ndarray:
    """Crop each image, padded with `most` black pixels, at its own offset."""
    size = pixels.shape[-1]
    framed = np.pad(pixels, ((0, 0), (0, 0), (most, most), (most, most)))
    cuts = [image[:, y : y + size, x : x + size] for image, y, x in zip(framed, down, right, strict=True)]
    return np.stack(cuts)


def image_evaluation(
    images: Images, *, batch: int, rank: int = 0, world: int = 1, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """Evaluation batches: every image exactly once. All batches have the same shape and all ranks the same number.

    The last batch is padded with black images whose target is `IGNORED`.
    """
    check_places(batch, rank, world)
    for first in range(0, len(images), batch * world):
        which = np.arange(first + rank * batch, first + (rank + 1) * batch)
        real = which < len(images)
        pixels, labels = images.read(np.where(real, which, 0))
        pixels = np.where(real[:, None, None, None], pixels, 0)
        yield to_device(_batch(pixels, np.where(real, labels, IGNORED)), torch.device(device))


def _batch(pixels: np.ndarray, labels: np.ndarray) -> Batch:
    """Scale pixels to [−1, 1], as is usual for vision Transformers."""
    scaled = np.ascontiguousarray(pixels).astype(np.float32) / 127.5 - 1.0
    return Batch(torch.from_numpy(scaled), torch.from_numpy(np.ascontiguousarray(labels)))
