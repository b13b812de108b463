"""Training data: text sources, tokenizers, a memory-mapped token cache, resumable data loaders; images, too.

corpus = prepare(["python"])                             # or files, folders, globs, hf:NAME
with Loader(corpus.train, length=512, batch=32, seed=0) as loader:
    for batch in loader:                                 # endless: batch.inputs, batch.targets
        ...
corpus.val.bits_per_byte(mean_loss_in_nats)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils import lazy

if TYPE_CHECKING:
    from normlab.data.batch_loader import IGNORED, Batch, BatchLoader
    from normlab.data.corpus import Corpus, Tokens, prepare
    from normlab.data.image_samples import ImageSamples, image_evaluation
    from normlab.data.images import ImageSet, prepare_images
    from normlab.data.loader import Loader, TextSamples, evaluation_batches
    from normlab.data.masking import Masking
    from normlab.data.readers import Document
    from normlab.data.sources import Source, open_source, open_sources
    from normlab.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchLoader",
    "Corpus",
    "Document",
    "ImageSamples",
    "ImageSet",
    "Loader",
    "Masking",
    "Source",
    "TextSamples",
    "Tokenizer",
    "Tokens",
    "evaluation_batches",
    "image_evaluation",
    "load_tokenizer",
    "open_source",
    "open_sources",
    "prepare",
    "prepare_images",
]

# On first use: processes that tokenise need no torch.
__getattr__ = lazy.loader(
    __name__,
    {
        "IGNORED": "batch_loader",
        "Batch": "batch_loader",
        "BatchLoader": "batch_loader",
        "Corpus": "corpus",
        "Document": "readers",
        "ImageSamples": "image_samples",
        "ImageSet": "images",
        "Loader": "loader",
        "Masking": "masking",
        "Source": "sources",
        "TextSamples": "loader",
        "Tokenizer": "tokenizer",
        "Tokens": "corpus",
        "evaluation_batches": "loader",
        "image_evaluation": "image_samples",
        "load_tokenizer": "tokenizer",
        "open_source": "sources",
        "open_sources": "sources",
        "prepare": "corpus",
        "prepare_images": "images",
    },
    renamed={
        "Feed": "normlab.data.BatchLoader",
        "ImageLine": "normlab.data.ImageSamples",
        "TextLine": "normlab.data.TextSamples",
    },
)
