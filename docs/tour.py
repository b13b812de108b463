# The cells of examples/normlab_tour.ipynb, which `make notebook` executes. Tests run them with smaller settings.
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# %% [markdown]
# # A tour of NormLab
#
# Put a normalisation scheme into a model of your own, check whether it survives depth, train it for a minute, and
# look inside. Everything here ran on a CPU; `make notebook` runs it again. You need `pip install "normlab[plots]"`.

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import normlab
from normlab.roles import find_roles
from normlab.stack import initialise_

SCHEMES = ("pre", "post", "peri", "geonorm")
DEPTH, DIM, STEPS = 8, 64, 60
CHECK_DEPTHS = (6, 12)
torch.set_num_threads(1)  # the matrices are small
print(normlab.list_schemes())

# %% [markdown]
# ## What is there
#
# A scheme is an object with options. `normlab schemes` lists all of them; the card of one says what it is, what it
# costs and where it fails.

# %%
scheme = normlab.scheme("peri", step=0.5)
print(scheme, "|", scheme.law(DEPTH).forward, "|", scheme.law(DEPTH).backward)

# %% [markdown]
# ## Put a scheme into a model
#
# You bring attention and MLP: tensor in, update out. `normlab.Stack` owns the residual connections and the norms.
# Names such as `0.weight` say nothing of what a matrix does, so the model says it once (`find_roles`);
# initialisation, weight decay and constraints follow from that.


# %%
class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.qkv, self.out_proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, scheme: str, depth: int = DEPTH, dim: int = DIM):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        mlps = [nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(depth)]
        self.stack = normlab.Stack(scheme, [(Attention(dim), mlp) for mlp in mlps], dim)
        self.head = nn.Linear(dim, 256, bias=False)
        initialise_(self, self.stack.bound, self.roles(), generator=torch.Generator().manual_seed(0))

    def roles(self):
        return find_roles(self, {"*.branches.1.0.weight": "up", "*.branches.1.2.weight": "down"})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.stack(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


print(Model("geonorm").stack.certificate())

# %% [markdown]
# ## Check it
#
# The design is built at several depths, measured at initialisation and again after thirty steps. Each line has a
# number, its limit, and the blocks to blame. (On the command line: `normlab check post`.)

# %%
report = normlab.check("post", depths=CHECK_DEPTHS, max_seconds=600, start_size="none", progress=False)
print(report.table())

# %% [markdown]
# ## Train it for a minute
#
# A plain loop. Two lines belong to the scheme: its parameter groups, and `after_step`, which re-imposes what a scheme
# keeps fixed (nGPT's unit rows; nothing for most). In the last step a probe measures every block. One learning rate
# serves all schemes here, so **this is no comparison**: `normlab compare` tunes the rate of each and repeats over
# seeds.

# %%
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))


def batches(steps: int, size: int = 16, length: int = 64):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)]


def train(scheme: str):
    model = Model(scheme)
    optimiser = torch.optim.AdamW(model.stack.bound.param_groups(model.roles(), lr=3e-3, weight_decay=0.1))
    losses = []
    for step, tokens in enumerate(batches(STEPS)):
        with normlab.probe(model, step=step, active=step == STEPS - 1) as look:
            loss = model(tokens)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            model.stack.bound.after_step(model.roles())
        losses.append(loss.item())
    return losses, look.profile


trained = {scheme: train(scheme) for scheme in SCHEMES}
for name, (losses, _) in trained.items():
    print(f"{name}: loss {losses[0]:.2f} → {losses[-1]:.2f} nats a byte")

# %% [markdown]
# ## Look at it
#
# The loss says which of them learns. The profiles say why: the size of the state, how alike tokens are, how far a
# block turns a token, and what gradient reaches each boundary.

# %%
figure, axes = plt.subplots(1, 5, figsize=(17, 3.2))
titles = (
    "loss, nats a byte",
    "RMS of the state",
    "mean cosine of two tokens",
    "turn of a block, rad",
    "gradient of the state",
)
for name, (losses, profile) in trained.items():
    for axis, curve in zip(axes, (losses, profile.rms, profile.cos, profile.ang, profile.grad_h), strict=True):
        axis.plot(curve, label=name)
for axis, title in zip(axes, titles, strict=True):
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step" if title.startswith("loss") else "block")
for axis in (axes[1], axes[4]):
    axis.set_yscale("log")
axes[0].legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## And in theory?
#
# Tokens as particles on a sphere that attract each other through attention: how fast do they become one under each
# scheme?

# %%
simulation = normlab.simulate(list(SCHEMES), tokens=32, dim=3, time=10.0, looks=20, device="cpu")
print(simulation.table())

# %% [markdown]
# ## Next
#
# - `normlab compare --schemes pre peri geonorm --data book.txt`: rates tuned, seeds paired, intervals, one page.
# - `normlab ladder`: does the gap survive scale?
# - `normlab check your_file.py:factory`: your own design, at several depths.
