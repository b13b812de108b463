"""Classes of images: a vision Transformer, judged by its accuracy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from normlab.errors import NormLabError
from normlab.models.config import TransformerConfig
from normlab.models.vision_config import VisionConfig
from normlab.train.metrics import ACCURACY
from normlab.train.tasks.base import Task

if TYPE_CHECKING:
    import numpy as np

    from normlab.data import Batch, ImageSet
    from normlab.data.batch_loader import SampleSequence
    from normlab.train.config import TrainConfig
    from normlab.train.storage.folder import RunFolder


class ImagesTask(Task):
    """Images one by one; their size is the model's."""

    name = "images"
    about = "the classes of images"
    model = VisionConfig
    fields = ("images", "shift", "flip")
    data = ("digits",)
    # Text has millions of targets, a set of images has thousands: accuracy on fewer would hardly say anything.
    val_fraction = 0.2
    metric = ACCURACY

    def check(self, config: TrainConfig) -> None:
        if config.images < 1:
            raise NormLabError(f"images must be at least 1, got {config.images}")
        if not 0 <= config.shift < cast(VisionConfig, config.model).image_size:
            raise NormLabError(f"shift must be from 0 to less than an image's size, got {config.shift}; try 1")

    def fitted(self, config: TrainConfig) -> TransformerConfig:
        return config.model

    def sequence(self, config: TrainConfig) -> int:
        return config.model.sequence

    def steps(self, config: TrainConfig) -> int:
        return math.ceil(config.images / config.batch)

    def open(self, config: TrainConfig, *, progress: bool) -> ImageSet:
        from normlab.data import prepare_images

        model = cast(VisionConfig, config.model)
        options = {"val_data": config.val_data, "val_fraction": config.val_fraction, "progress": progress}
        return prepare_images(config.data, size=model.image_size, channels=model.channels, **options)

    def with_answers(self, config: TrainConfig, data: ImageSet) -> TransformerConfig:
        return dataclasses.replace(config.model, classes=len(data.classes))

    def line(self, config: TrainConfig, data: ImageSet) -> SampleSequence:
        from normlab.data import ImageSamples

        return ImageSamples(data.train, seed=config.seed, shift=config.shift, flip=config.flip)

    def evaluation(self, config: TrainConfig, data: ImageSet, *, batch: int, **places: Any) -> Iterator[Batch]:
        from normlab.data import image_evaluation

        return image_evaluation(data.val, batch=batch, **places)

    def target_counts(self, config: TrainConfig, data: ImageSet) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        classes = len(data.classes)
        trained, asked = (np.bincount(side.labels[side.chosen], minlength=classes) for side in (data.train, data.val))
        return trained, asked

    def evaluation_samples(self, config: TrainConfig, data: ImageSet) -> int:
        return len(data.val)

    def keep(self, data: ImageSet, folder: RunFolder) -> None:
        from normlab.utils.files import write_json

        write_json(folder.classes, list(data.classes))

    def describe(self, scores: Mapping[str, float]) -> str:
        return f"{100 * scores['accuracy']:.2f} % of the images right, {scores['loss']:.4f} nats an image"
