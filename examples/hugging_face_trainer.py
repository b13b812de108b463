"""Hugging Face's Trainer, with the scheme's parameter groups and constraint.

Run it: python examples/hugging_face_trainer.py [SCHEME ...]
"""

import sys
from tempfile import TemporaryDirectory
from typing import Any

from your_text import TEXT, report

from normlab import NormLabError

try:
    from normlab.hf import NormLabCallback, NormLabConfig, NormLabForCausalLM, optimizer_cls_and_kwargs
except NormLabError as error:
    sys.exit(str(error))
from transformers import Trainer, TrainingArguments, set_seed

SIZES = {"depth": 4, "dim": 64, "heads": 4, "vocab_size": 256, "max_length": 64}
# Sixteen rows a step on the CPU, a loss every ten steps; nothing is saved or sent anywhere.
HOW: dict[str, Any] = {
    "learning_rate": 6e-3, "weight_decay": 0.1, "per_device_train_batch_size": 16, "logging_steps": 10,
    "use_cpu": True, "dataloader_pin_memory": False, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
}  # fmt: skip


def train(scheme: str, steps: int = 30) -> tuple[NormLabForCausalLM, list[float]]:
    set_seed(0)
    model = NormLabForCausalLM(NormLabConfig(model={"scheme": scheme, **SIZES}))
    rows: Any = [{"input_ids": row, "labels": row} for row in TEXT.unfold(0, 64, 64)]
    with TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=steps, **HOW)
        trainer = Trainer(
            model,
            args,
            train_dataset=rows,
            callbacks=[NormLabCallback()],
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, args),
        )
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    for scheme in sys.argv[1:] or ["geonorm"]:
        report(scheme, train(scheme)[1])
