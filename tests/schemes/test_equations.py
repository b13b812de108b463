"""Every scheme against its equations as `transcription.py` writes them: outputs and all gradients, in float64.

Both sides share the leaves of the graph (embedding, branch weights, gains and scales), all of them random, so a gain in
the wrong place, a skip from the wrong tensor or a constant from the wrong depth shows in the output or in a gradient.
"""

import itertools
import math
from functools import partial

import pytest
import torch

import normlab
from tests.matrix import quick_if

from . import transcription as written
from .agreement import tolerances, with_gradients
from .small import gaussian

B, T, D, HIDDEN = 2, 4, 6, 7
TAU = 1e-3  # the library's guard where a learned angle offset b meets a zero update (facts, 2.1)
DEPTHS = (1, 2, 5)
START_AS_PRE = {"pre", "mhc", "hc", "attnres"}
"""Schemes whose first state is Pre-Norm's by design."""


def weight(rows, columns, seed):
    return (gaussian(rows, columns, seed=seed) / math.sqrt(columns)).requires_grad_()


def attention(wq, wk, wv, wo, x):
    """Not the library's: one head that sees all tokens."""
    scores = (x @ wq.T) @ (x @ wk.T).transpose(-1, -2)
    return scores.softmax(-1) @ (x @ wv.T) @ wo.T


def mlp(w_up, w_down, x):
    return torch.tanh(x @ w_up.T) @ w_down.T


def branches(depth):
    """(attention, mlp) per block, and the weights in them."""
    blocks, leaves = [], []
    for k in range(depth):
        first = [weight(D, D, seed=100 * k + i) for i in range(4)]
        second = [weight(HIDDEN, D, seed=100 * k + 10), weight(D, HIDDEN, seed=100 * k + 11)]
        blocks.append((partial(attention, *first), partial(mlp, *second)))
        leaves += [*first, *second]
    return blocks, leaves


class Network:
    """The library's modules for one scheme, with random gains and scales, and what is in them."""

    def __init__(self, spec, depth, spread=0.5):
        self.scheme = normlab.scheme(spec)
        bound = self.scheme.bind(depth=depth, dim=D)
        self.blocks = torch.nn.ModuleList(bound.block(k) for k in range(depth)).double()
        self.entry, self.exit, self.depth = bound.entry().double(), bound.exit().double(), depth
        for seed, parameter in enumerate(self.parameters()):
            # Some gains and step sizes come out negative: abs(α) and walking backwards are then seen to matter.
            parameter.data += spread * gaussian(*parameter.shape, seed=5000 + seed)

    def __call__(self, x, branches):
        state = self.entry(x)
        for block, pair in zip(self.blocks, branches, strict=True):
            state = block(state, pair)
        return self.exit(state)

    def parameters(self):
        return [*self.entry.parameters(), *self.blocks.parameters(), *self.exit.parameters()]

    @property
    def norm(self):
        kind = {"rms": written.rms_norm, "layer": written.layer_norm}[self.scheme.norm]
        return partial(kind, eps=self.scheme.eps)

    def gain(self, module):
        if module.weight is None:
            return None
        gain = 1 + module.weight if self.scheme.gain == "offset" else module.weight
        return gain if module.bias is None else (gain, module.bias)

    def gains(self, place):
        """Per block, per step: the gain of the norm at a place such as "read" or "write.norm"."""
        return [[self.gain(step.get_submodule(place)) for step in block.steps] for block in self.blocks]

    def values(self, place):
        return [[step.get_submodule(place).weight for step in block.steps] for block in self.blocks]

    @property
    def final(self):
        return self.gain(self.exit)


def pre(net, x, f):
    return written.pre(x, f, net.gains("read"), net.final, step=net.scheme.step, norm=net.norm)


def pre_on_the_sphere(net, x, f):
    gains, final = net.gains("read.norm"), net.gain(net.exit.norm)
    return written.pre(x, f, gains, final, step=net.scheme.step, norm=net.norm)


def post(net, x, f):
    return written.post(x, f, net.gains("write.norm"), norm=net.norm)


def output(net, x, f):
    return written.output(x, f, net.gains("shape"), net.final, norm=net.norm)


def peri(net, x, f):
    entry = net.gain(net.entry) if net.scheme.entry_norm else False
    gains = net.gains("read"), net.gains("shape")
    return written.peri(x, f, *gains, net.final, step=net.scheme.step, entry=entry, norm=net.norm)


def mix(net, x, f):
    posts = math.floor(net.scheme.post_fraction * net.depth)
    places = ["write.norm" if k < posts else "read" for k in range(net.depth)]
    gains = [[net.gain(s.get_submodule(place)) for s in b.steps] for b, place in zip(net.blocks, places, strict=True)]
    return written.mix(x, f, gains, net.final, fraction=net.scheme.post_fraction, norm=net.norm)


def lns(net, x, f):
    return written.lns(x, f, net.gains("read.0"), net.final, norm=net.norm)


def deepnorm(net, x, f):
    return written.deepnorm(x, f, net.gains("write.norm"), alpha=net.scheme.alpha, norm=net.norm)


def dual(net, x, f):
    final_norm = partial(net.norm.func, eps=net.scheme.final_eps)
    weights = {"s": net.scheme.scale, "a": net.scheme.post_weight}
    final = net.gain(net.exit.norm)
    return written.dual(x, f, net.gains("write.norm"), final, **weights, norm=net.norm, final_norm=final_norm)


def hybrid(net, x, f):
    star = net.scheme.star
    # z = N(y): the norm of what attention's step writes, or in a Pre-Norm block of what the MLP reads.
    norms = [b.steps[1].read if star and k == 0 else b.steps[0].write.norm for k, b in enumerate(net.blocks)]
    gains = [net.gain(norm) for norm in norms]
    first = net.gain(net.blocks[0].steps[0].read) if star else None
    return written.hybrid(x, f, gains, net.final, star=star, first=first, norm=net.norm)


def ngpt(net, x, f):
    # The raw parameter starts at 1/√d and acts as raw · α · √d.
    trick = net.scheme.alpha * math.sqrt(D)
    alphas = [[trick * raw for raw in pair] for pair in net.values("write.alpha")]
    return written.ngpt(x, f, alphas, eps=net.scheme.eps)


def keel(net, x, f):
    inner = net.gains("read")
    outer = [[None, None]] + [[net.gain(s.write.norm) for s in b.steps] for b in list(net.blocks)[1:]]
    alpha = {"sublayers": 2 * net.depth, "blocks": net.depth, "sqrt": math.sqrt(net.depth)}
    alpha = alpha.get(net.scheme.alpha, net.scheme.alpha)
    # A single block is Pre-Norm alone and would end without any norm.
    final = net.final if net.scheme.final_norm or net.depth == 1 else False
    return written.keel(x, f, inner, outer, alpha=alpha, final=final, norm=net.norm)


def layerscale(net, x, f):
    return written.layerscale(x, f, net.gains("read"), net.values("shape"), net.final, norm=net.norm)


def geonorm(net, x, f):
    s = net.scheme
    writes = [[step.write for step in block.steps] for block in net.blocks]
    return written.geonorm(
        x,
        f,
        [[(w.a, w.b) for w in pair] for pair in writes] if s.learned else None,
        net.final if s.final_norm else False,
        decay=s.decay,
        strength=s.step,
        entry=s.entry_norm,
        input_gains=net.gains("read") if s.input_norm else None,
        norm=net.norm,
        clamp=s.max_angle,
        second_clamp=s.second_clamp,
        decay_first=s.order == "decay-first",
        tau=TAU if s.learned else 0.0,
    )


def spannorm(net, x, f):
    s = net.scheme
    first = net.gain(net.blocks[0].steps[0].read) if s.first_norm else None
    final = net.final if s.final_norm else False
    entry = {"entry": s.entry_norm, "first_norm": s.first_norm}
    return written.spannorm(x, f, net.gains("write.norm"), first, final=final, norm=net.norm, **entry)


def logits(module):
    return module.project.weight, module.base, module.scale


def mhc(net, x, f):
    s = net.scheme
    return written.mhc(
        x,
        f,
        [[logits(step.read.logits) for step in block.steps] for block in net.blocks],
        net.gains("read.norm"),
        None if s.merge == "mean" else logits(net.exit.logits),
        net.gain(net.exit.norm),
        n=s.streams,
        rounds=s.rounds,
        magnitude=s.magnitude,
        eps=s.eps,
        mix_eps=s.mix_eps,
        mixing=s.mixing == "sinkhorn",
        norm=net.norm,
    )


def gated(net, x, f):
    def read(module):
        matrices = [module.down.weight, module.up.weight]
        return (net.gain(module.norm.affine), *matrices, *([] if module.inject is None else [module.inject.weight]))

    reads = [[read(step.read) for step in block.steps] for block in net.blocks]
    return written.gated(x, f, reads, read(net.exit), n=net.scheme.streams, norm=net.norm)


def highway(net, x, f):
    s = net.scheme

    def gate(module):
        return module.logit, None if module.project is None else module.project.weight

    return written.highway(
        x,
        f,
        net.gains("read"),
        net.gains("shape"),
        [[gate(step.write.gate) for step in block.steps] for block in net.blocks],
        net.gain(net.entry) if s.entry_norm else False,
        net.final,
        variance=s.keep == "variance",
        T=s.temperature,
        norm=net.norm,
    )


def lambdas(net, x, f):
    reads = [block.steps[0].read for block in net.blocks]
    entry = net.gain(net.entry.norm) if net.scheme.entry_norm else False
    scalars = [(read.lambda_r, read.lambda_0) for read in reads]
    return written.lambdas(x, f, scalars, net.gains("read.norm"), entry, net.gain(net.exit.norm), norm=net.norm)


def attnres(net, x, f):
    s = net.scheme

    def query(read):
        return (read.query, net.gain(read.key)) if hasattr(read, "key") else (None, None)

    length = 1 if s.groups >= 2 * net.depth else 2 * math.ceil(net.depth / s.groups)
    return written.attnres(
        x,
        f,
        [[query(step.read) for step in block.steps] for block in net.blocks],
        net.gains("read.norm"),
        query(net.exit),
        net.gain(net.exit.norm),
        length=length,
        norm=net.norm,
        key_norm=net.norm,
    )


def hc_dynamic(net, part):
    w, n = part.project.weight, net.scheme.streams
    return net.gain(part.norm), w[0], w[1 : n + 1].T, w[n + 1], part.scale[0], part.scale[1]


def hc(net, x, f):
    s = net.scheme
    reads = [[step.read for step in block.steps] for block in net.blocks]
    dynamic = [[hc_dynamic(net, read.dynamic) for read in pair] for pair in reads] if s.dynamic else None
    return written.hc(
        x,
        f,
        [[(read.read, read.mix, read.write) for read in pair] for pair in reads],
        net.gains("read.norm"),
        net.gain(net.exit.norm),
        n=s.streams,
        dynamic=dynamic,
        tanh=s.tanh,
        norm=net.norm,
    )


def siamese_gains(net, read):
    if read.main is None:
        return read.scale.weight, net.gain(read.beside)
    return tuple(net.gain(norm) for norm in (read.main, read.beside, read.inner))


def siamese(net, x, f):
    gains = [[siamese_gains(net, step.read) for step in block.steps] for block in net.blocks]
    last = [net.gain(norm) for norm in (net.exit.main, net.exit.beside, net.exit.final)]
    return written.siamese(x, f, gains, last, hybrid=net.scheme.form == "hybrid", norm=net.norm)


def none(net, x, f):
    return written.none(x, f)


CASES = {
    "none": none,
    "pre": pre,
    "pre(step=0.3)": pre,
    "pre(form='sphere')": pre_on_the_sphere,
    "pre(form='sphere', step=0.3)": pre_on_the_sphere,
    "pre(norm='layer', bias=True)": pre,
    "pre(gain='none')": pre,
    "post": post,
    "post(norm='layer', bias=True)": post,
    "output": output,
    "output(norm='layer')": output,
    "peri": peri,
    "peri(step=0.1)": peri,
    "peri(output_gain=0.3)": peri,
    "peri(entry_norm=False)": peri,
    "peri(gain='offset')": peri,
    "peri(norm='layer', bias=True)": peri,
    "mix": mix,
    "mix(post_fraction=0.0)": mix,
    "mix(post_fraction=0.5)": mix,
    "mix(post_fraction=1.0)": mix,
    "mix(norm='layer', bias=True)": mix,
    "lns": lns,
    "lns(norm='layer', bias=True)": lns,
    "deepnorm": deepnorm,
    "deepnorm(alpha=1.7)": deepnorm,
    "deepnorm(norm='layer', bias=True)": deepnorm,
    "dual": dual,
    "dual(scale=0.05, post_weight=0.7)": dual,
    "dual(norm='layer', bias=True)": dual,
    "hybrid": hybrid,
    "hybrid(star=True)": hybrid,
    "ngpt": ngpt,
    "ngpt(alpha=0.5)": ngpt,
    "ngpt(eps=0.0)": ngpt,
    "keel": keel,
    "keel(alpha='blocks')": keel,
    "keel(alpha='sqrt')": keel,
    "keel(alpha=1.5, final_norm=True)": keel,
    "keel(norm='layer', bias=True)": keel,
    "layerscale": layerscale,
    "layerscale(gamma=0.0, scalar=True)": layerscale,
    "layerscale(norm='layer', bias=True)": layerscale,
    "geonorm": geonorm,
    "geonorm(learned=False)": geonorm,
    "geonorm(learned=False, decay='sqrt')": geonorm,
    "geonorm(learned=False, decay='linear')": geonorm,
    "geonorm(decay='sqrt')": geonorm,
    "geonorm(decay='linear')": geonorm,
    "geonorm(decay='none')": geonorm,
    "geonorm(decay='none', second_clamp=False)": geonorm,
    "geonorm(max_angle=0.3, step=0.5)": geonorm,
    "geonorm(order='decay-first', learned=False)": geonorm,
    "geonorm(order='decay-first', max_angle='pi/8', decay='sqrt')": geonorm,
    "geonorm(order='decay-first', decay='none', second_clamp=False)": geonorm,
    "geonorm(entry_norm=False, final_norm=False)": geonorm,
    "geonorm(input_norm=True)": geonorm,
    "geonorm(input_norm=True, norm='layer', bias=True)": geonorm,
    "spannorm": spannorm,
    "spannorm(entry_norm=False)": spannorm,
    "spannorm(first_norm=False, final_norm=True)": spannorm,
    "spannorm(norm='layer', bias=True)": spannorm,
    "mhc": mhc,
    "mhc(streams=2, rounds=3, diagonal=8.0, merge='mean')": mhc,
    "mhc(alpha=1.0, magnitude=1.0, mix_eps=1e-3)": mhc,
    "mhc(mixing='none')": mhc,
    "mhc(norm='layer', bias=True)": mhc,
    "gated": gated,
    "gated(streams=2, rank=3)": gated,
    "gated(rank=3, gain='offset')": gated,
    "gated(rank=3, norm='layer', bias=True)": gated,
    "highway": highway,
    "highway(gate='dynamic')": highway,
    "highway(keep='variance', temperature=0.3, gate_bias=0.0)": highway,
    "muse-spark(gate='dynamic')": highway,
    "highway(entry_norm=False)": highway,
    "highway(norm='layer', bias=True)": highway,
    "lambdas": lambdas,
    "nanochat": lambdas,
    "lambdas(entry_norm=False)": lambdas,
    "lambdas(norm='layer', bias=True)": lambdas,
    "attnres": attnres,
    "attnres(groups=2)": attnres,
    "attnres(groups=1)": attnres,
    "attnres(groups=3, key_gain=True)": attnres,
    "attnres(norm='layer', bias=True)": attnres,
    "hc": hc,
    "hc(dynamic=False)": hc,
    "hc(streams=3, tanh=False, alpha=0.5)": hc,
    "hc(streams=1, norm='layer', bias=True)": hc,
    "siamese": siamese,
    "siamese(norm='layer', bias=True)": siamese,
    "siamese(form='hybrid')": siamese,
    "siamese(form='hybrid', gain='offset')": siamese,
}


# Twenty rounds of Sinkhorn in five blocks take a second: once is enough.
SLOW = ("mhc(norm='layer', bias=True)", "mhc(alpha=1.0, magnitude=1.0, mix_eps=1e-3)")


@quick_if(lambda spec, depth: depth == (1 if spec in SLOW else 5))
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("spec", CASES)
def test_library_and_equations_agree(spec, depth):
    network = Network(spec, depth)
    f, weights = branches(depth)
    leaves = [*weights, *network.parameters()]

    def transcribed(x):
        return with_gradients(CASES[spec](network, x, f), [x, *leaves])

    x = gaussian(B, T, D, seed=1).requires_grad_()
    ours = with_gradients(network(x, f), [x, *leaves])
    allowed = tolerances(transcribed, x, 2 * depth)
    for mine, its, atol in zip(ours, transcribed(x), allowed, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=atol)


def test_every_registered_scheme_has_a_transcription():
    assert {normlab.scheme(spec).name for spec in CASES} == set(normlab.list_schemes())


def test_equations_tell_schemes_apart():
    """With all gains at one and the same branches, any two schemes differ by far more than any tolerance above.

    But for those that start as another one by design: `test_streams.py` shows where they differ.
    """
    f, _ = branches(5)
    x = gaussian(B, T, D, seed=1)
    plain = {name: CASES[name](Network(name, 5, spread=0.0), x, f).detach() for name in normlab.list_schemes()}
    for (a, first), (b, second) in itertools.combinations(plain.items(), 2):
        if {a, b} <= START_AS_PRE:
            continue
        assert float((first - second).abs().max()) > 1e-3, (a, b)


def test_ngpt_guard_changes_nothing_at_ordinary_sizes():
    """Against the bare n(v) = v/‖v‖: eps² = 1e-12 under a root of about one, twice a sublayer."""
    network = Network("ngpt(alpha=0.5)", 3)
    f, _ = branches(3)
    x = gaussian(B, T, D, seed=1)
    bare = written.ngpt(x, f, [[0.5 * math.sqrt(D) * raw for raw in pair] for pair in network.values("write.alpha")])
    result = network(x, f)
    # Each root is off by a relative 5e-13/‖v‖²; six sublayers with branches above 0.2 in length, amplified by ten.
    torch.testing.assert_close(result, bare, rtol=0, atol=10 * 6 * 5e-13 * (1 / 0.2**2 + 1))
    assert not torch.equal(result, bare)
