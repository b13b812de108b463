"""Export NormLab models as Hugging Face models, with caches, tokenizer, weights and a model card."""
