"""Parts of `benchmarks/code_corpus.py`: pinned wheels, their licences, which files are kept, near copies."""
