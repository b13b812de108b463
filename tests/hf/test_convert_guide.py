"""The guide's programs run, and its adapter is as good as its word."""

import re
from pathlib import Path

import torch
import transformers

from normlab import hf

from .zoo import answer, inputs, scatter_

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "converting.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_programs_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for program in PROGRAMS:
        exec(compile(program, str(GUIDE), "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("pre, serial, 4 blocks of width 64\n4 blocks of LlamaDecoderLayer")
    for comment in re.findall(r"\)  # (pre, .*)", PROGRAMS[0]):
        assert comment in printed


def test_the_adapter_for_bloom_is_exact_and_short():
    program = next(one for one in PROGRAMS if "def bloom" in one)
    assert len(program[program.index("def bloom") :].splitlines()) < 20
    names: dict = {}
    exec(compile(program, str(GUIDE), "exec"), names)
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    model = scatter_(transformers.BloomForCausalLM(config)).eval()
    same = hf.convert(model, "pre", adapter=names["bloom"])
    batch = inputs(model, "left")
    for use_cache in (True, False):
        assert torch.equal(answer(same(**batch, use_cache=use_cache)), answer(model(**batch, use_cache=use_cache)))
    texts = [one.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=60) for one in (model, same)]
    assert torch.equal(*texts)
