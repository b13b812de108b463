"""The guide's programs run as they stand, one after the other, beside a run of that name."""

from __future__ import annotations

import re
from pathlib import Path

from normlab import DecoderConfig, TrainConfig
from normlab.train.trainer import train
from tests.hf.test_export import TEXT

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "hugging-face.md"


def test_its_programs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)
    model = DecoderConfig(depth=1, dim=32, heads=2)
    config = TrainConfig(model=model, data=("text.txt",), length=32, batch=4, tokens=4096, evals=1, saves=0)
    train(config, Path("runs/fox"), progress=False)
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(programs) == 4
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, str(GUIDE), "exec"), names)
    assert "the quick" in capsys.readouterr().out
