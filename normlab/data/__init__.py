"""Text in, tokens out: sources, tokenizers, a memory-mapped cache, a loader that resumes at the exact token.

corpus = prepare(["python"])                             # or files, folders, globs, hf:NAME
with Loader(corpus.train, length=512, batch=32, seed=0) as loader:
    for batch in loader:                                 # without end: batch.inputs, batch.targets
        ...
corpus.val.bits_per_byte(mean_loss_in_nats)
"""

from normlab.data.corpus import Corpus, Tokens, prepare
from normlab.data.loader import IGNORED, Batch, Loader, evaluation_batches
from normlab.data.readers import Document
from normlab.data.sources import Source, open_source, open_sources
from normlab.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "Corpus",
    "Document",
    "Loader",
    "Source",
    "Tokenizer",
    "Tokens",
    "evaluation_batches",
    "load_tokenizer",
    "open_source",
    "open_sources",
    "prepare",
]
