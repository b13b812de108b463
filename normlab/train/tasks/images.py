"""Image classification: a vision Transformer, measured by its accuracy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from normlab.errors import NormLabError, advice_for
from normlab.models.vision_config import VisionConfig
from normlab.train.config import TaskName, TrainConfig
from normlab.train.metrics import ACCURACY
from normlab.train.tasks.base import Task
from normlab.utils.counts import Count

if TYPE_CHECKING:
    import numpy as np

    from normlab.data import Batch, ImageSet
    from normlab.data.batch_loader import SampleSequence
    from normlab.train.storage.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class ImageTrainConfig(TrainConfig):
    """Configuration of an image-classification run. The size of the images is a field of the model."""

    model_class: ClassVar = VisionConfig
    budget: ClassVar = "images"

    task: TaskName = "images"
    model: VisionConfig = field(default_factory=VisionConfig)
    data: tuple[str, ...] = ("digits",)
    """Folders with one folder of images per class; digits: the handwritten digits of scikit-learn."""
    # A set of images has thousands of targets, a text has millions: accuracy on fewer would have a large error.
    val_fraction: float = 0.2
    """Fraction of the images held out for validation where val_data is empty."""
    images: Count = 100_000
    """Training images, e.g. 200k; an image that is seen again counts again."""
    shift: int = 0
    """Augmentation: shift training images at random by up to this many pixels; 0: none."""
    flip: bool = False
    """Augmentation: mirror half of the training images."""

    def check(self) -> None:
        if self.images < 1:
            raise NormLabError(f"images must be at least 1, got {self.images}; {advice_for(self, 'images')}")
        if not 0 <= self.shift < self.model.image_size:
            raise NormLabError(f"shift must be from 0 to less than an image's size, got {self.shift}; try 1")

    @property
    def steps(self) -> int:
        return math.ceil(self.images / self.batch)

    @property
    def sequence(self) -> int:
        return self.model.sequence


class ImagesTask(Task):
    """Predict the class of an image."""

    config = ImageTrainConfig
    metric = ACCURACY

    def open(self, config: ImageTrainConfig, *, progress: bool) -> ImageSet:
        from normlab.data import prepare_images

        options = {"val_data": config.val_data, "val_fraction": config.val_fraction, "progress": progress}
        data = prepare_images(config.data, size=config.model.image_size, channels=config.model.channels, **options)
        _check_classes(data)
        return data

    def with_answers(self, config: ImageTrainConfig, data: ImageSet) -> VisionConfig:
        return dataclasses.replace(config.model, classes=len(data.classes))

    def line(self, config: ImageTrainConfig, data: ImageSet) -> SampleSequence:
        from normlab.data import ImageSamples

        return ImageSamples(data.train, seed=config.seed, shift=config.shift, flip=config.flip)

    def evaluation(self, config: ImageTrainConfig, data: ImageSet, *, batch: int, **places: Any) -> Iterator[Batch]:
        from normlab.data import image_evaluation

        return image_evaluation(data.val, batch=batch, **places)

    def target_counts(self, config: ImageTrainConfig, data: ImageSet) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        classes = len(data.classes)
        trained, asked = (np.bincount(side.labels[side.chosen], minlength=classes) for side in (data.train, data.val))
        return trained, asked

    def evaluation_samples(self, config: ImageTrainConfig, data: ImageSet) -> int:
        return len(data.val)

    def keep(self, data: ImageSet, folder: RunFolder) -> None:
        from normlab.utils.files import write_json

        write_json(folder.classes, list(data.classes))

    def describe(self, scores: Mapping[str, float]) -> str:
        return f"{100 * scores['accuracy']:.2f} % of the images right, {scores['loss']:.4f} nats an image"


def _check_classes(data: ImageSet) -> None:
    """Raise where the training images have one class: loss and gradient of every step are then zero."""
    import numpy as np

    labels = np.unique(data.train.labels[data.train.chosen])
    if len(labels) < 2:
        raise NormLabError(
            f"all training images are of one class, {data.classes[labels[0]]!r}, so there is nothing to learn; "
            "expected folders with one folder of images for every class"
        )
