"""Every scheme as plain tensor arithmetic: one function per scheme, the whole network of L blocks.

Written from the equations alone (facts, sections 2 and 3), apart from the library and without any of its code, so that
the two can be compared. A network takes

    x        the embedding, (..., D)
    blocks   one (attention, mlp) pair of callables per block, tensor in, update out
    gains    tensors of length D, one per norm, grouped as the scheme groups them; None stands for a norm without gain

and returns what the head reads. Every sublayer is written out: nothing here knows of steps, parts or blocks. The
equations have no epsilon but that of their norms; where the library guards a division, the guard is an argument here
(`eps`, `tau`), zero unless a test says otherwise.
"""

import math

import torch


def rms_norm(x, gain=None, eps=0.0):
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if gain is None else gain * y


def layer_norm(x, gain=None, eps=0.0):
    """With a gain alone, or a pair of gain and bias."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    if gain is None:
        return y
    if isinstance(gain, tuple):
        return gain[0] * y + gain[1]
    return gain * y


def unit(x, eps=0.0):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps * eps)


def length(x):
    return torch.sqrt((x * x).sum(-1, keepdim=True))


# -- 2.1 -------------------------------------------------------------------------------------------------------------


def geo(x, g, delta=1.0, a=1.0, b=0.0, clamp=math.pi / 4, second_clamp=True, tau=0.0, decay_first=False):
    """Steps 1 to 6 of the operator, with no guard but that of the learned b. `decay_first`: step 4 before the clamp of
    step 2, as the paper's summary has it; the map of step 3 stays behind that clamp.
    """
    v = g - (x * g).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
    t = length(v) / length(x)
    theta = torch.clamp(delta * t if decay_first else t, max=clamp)
    theta = a * theta + (b * t / torch.sqrt(t * t + tau * tau) if tau else b)
    theta = theta if decay_first else delta * theta
    if second_clamp:
        theta = torch.clamp(theta, max=clamp)
    return torch.cos(theta) * x + torch.sin(theta) * length(x) * v / length(v)


def decay_factor(decay, k, L):
    return {"harmonic": 1 / (k + 1), "sqrt": 1 / math.sqrt(k + 1), "linear": (L - k) / L, "none": 1.0}[decay]


def geonorm(
    x,
    blocks,
    maps=None,
    final=None,
    *,
    decay="harmonic",
    strength=1.0,
    entry=True,
    input_gains=None,
    norm=rms_norm,
    **operator,
):
    """`maps`: ((a, b) of attention, (a, b) of the MLP) per block; `final`: gain of the final norm, False for none.

    `strength` is the α of α/k; `operator` goes to `geo`.
    """
    L = len(blocks)
    if entry:
        x = math.sqrt(x.shape[-1]) * unit(x)
    for k, (attention, mlp) in enumerate(blocks):
        (a1, b1), (a2, b2) = ((1.0, 0.0), (1.0, 0.0)) if maps is None else maps[k]
        delta = strength * decay_factor(decay, k, L)
        g = attention(x if input_gains is None else norm(x, input_gains[k][0]))
        x = geo(x, g, delta, a1, b1, **operator)
        g = mlp(x if input_gains is None else norm(x, input_gains[k][1]))
        x = geo(x, g, delta, a2, b2, **operator)
    return x if final is False else norm(x, final)


# -- 2.2 -------------------------------------------------------------------------------------------------------------


def spannorm(x, blocks, gains, first=None, *, first_norm=True, entry=True, final=False, norm=rms_norm):
    """`gains`: (N1, N2) per block; `first`: gain of the extra norm on what attention reads in block 0."""
    if entry:
        x = math.sqrt(x.shape[-1]) * unit(x)
    for k, (attention, mlp) in enumerate(blocks):
        n1, n2 = gains[k]
        seen = norm(x, first) if k == 0 and first_norm else x
        y = norm(x + attention(seen), n1)
        x = norm(x + mlp(y), n2)
    return x if final is False else norm(x, final)


# -- 3.1 to 3.8 ------------------------------------------------------------------------------------------------------


def none(x, blocks):
    for attention, mlp in blocks:
        x = x + attention(x)
        x = x + mlp(x)
    return x


def pre(x, blocks, gains, final, *, step=1.0, norm=rms_norm):
    for k, (attention, mlp) in enumerate(blocks):
        x = x + step * attention(norm(x, gains[k][0]))
        x = x + step * mlp(norm(x, gains[k][1]))
    return norm(x, final)


def post(x, blocks, gains, *, norm=rms_norm):
    for k, (attention, mlp) in enumerate(blocks):
        x = norm(x + attention(x), gains[k][0])
        x = norm(x + mlp(x), gains[k][1])
    return x


def output(x, blocks, gains, final, *, norm=rms_norm):
    for k, (attention, mlp) in enumerate(blocks):
        x = x + norm(attention(x), gains[k][0])
        x = x + norm(mlp(x), gains[k][1])
    return norm(x, final)


def peri(x, blocks, gains_in, gains_out, final, *, step=1.0, entry=False, norm=rms_norm):
    """`entry`: gain of a norm on the embedding, False for none."""
    if entry is not False:
        x = norm(x, entry)
    for k, (attention, mlp) in enumerate(blocks):
        x = x + step * norm(attention(norm(x, gains_in[k][0])), gains_out[k][0])
        x = x + step * norm(mlp(norm(x, gains_in[k][1])), gains_out[k][1])
    return norm(x, final)


def mix(x, blocks, gains, final, *, fraction=0.25, norm=rms_norm):
    posts = math.floor(fraction * len(blocks))
    for k, (attention, mlp) in enumerate(blocks):
        if k < posts:
            x = norm(x + attention(x), gains[k][0])
            x = norm(x + mlp(x), gains[k][1])
        else:
            x = x + attention(norm(x, gains[k][0]))
            x = x + mlp(norm(x, gains[k][1]))
    return norm(x, final)


def lns(x, blocks, gains, final, *, norm=rms_norm):
    for k, (attention, mlp) in enumerate(blocks):
        x = x + attention(norm(x, gains[k][0]) / math.sqrt(k + 1))
        x = x + mlp(norm(x, gains[k][1]) / math.sqrt(k + 1))
    return norm(x, final)


def deepnorm(x, blocks, gains, *, alpha=None, norm=rms_norm):
    alpha = (2 * len(blocks)) ** 0.25 if alpha is None else alpha
    for k, (attention, mlp) in enumerate(blocks):
        x = norm(alpha * x + attention(x), gains[k][0])
        x = norm(alpha * x + mlp(x), gains[k][1])
    return x


def dual(x, blocks, gains, final, *, s=1.0, a=1.0, norm=rms_norm, final_norm=rms_norm):
    p, u = x, s * x
    for k, branches in enumerate(blocks):
        for i, branch in enumerate(branches):
            f = branch(p)
            p = norm(p + f, gains[k][i])
            u = u + s * f
    return a * p + final_norm(u, final)


# -- 3.9 nGPT --------------------------------------------------------------------------------------------------------


def ngpt(x, blocks, alphas, *, eps=0.0):
    """`alphas`: the vectors (α_A, α_M) per block, as they act."""
    h = unit(x)
    for k, (attention, mlp) in enumerate(blocks):
        h = unit(h + abs(alphas[k][0]) * (unit(attention(h), eps) - h), eps)
        h = unit(h + abs(alphas[k][1]) * (unit(mlp(h), eps) - h), eps)
    return h


def rotary(x, positions, theta=10_000.0):
    """Turn channel i of (..., T, head_dim) against channel i + head_dim/2 by position · θ^(-2i/head_dim)."""
    half = x.shape[-1] // 2
    columns = list(x.unbind(-1))
    turned = list(columns)
    for i in range(half):
        phi = positions * theta ** (-2 * i / x.shape[-1])
        turned[i] = columns[i] * torch.cos(phi) - columns[i + half] * torch.sin(phi)
        turned[i + half] = columns[i + half] * torch.cos(phi) + columns[i] * torch.sin(phi)
    return torch.stack(turned, dim=-1)


def softmax_attention(queries, keys, values, scale):
    """Causal attention, head by head and token by token; query heads share the key heads in order."""
    group = len(queries) // len(keys)
    heads = []
    for h, q in enumerate(queries):
        k, v = keys[h // group], values[h // group]
        rows = []
        for t in range(q.shape[-2]):
            scores = scale * (k[..., : t + 1, :] * q[..., t : t + 1, :]).sum(-1)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = weights / weights.sum(-1, keepdim=True)
            rows.append((weights.unsqueeze(-1) * v[..., : t + 1, :]).sum(-2))
        heads.append(torch.stack(rows, dim=-2))
    return torch.cat(heads, dim=-1)


def heads_of(x, weight, head_dim):
    """W x, cut into heads."""
    return list((x @ weight.T).split(head_dim, dim=-1))


def flat_norm_attention(x, wq, wk, wv, wo, head_dim, gain_q, gain_k, eps=0.0):
    """OLMo 2: queries and keys are normalised over all their heads at once (3.3), before rotary."""
    positions = torch.arange(x.shape[-2], dtype=x.dtype)
    q = [rotary(q, positions) for q in rms_norm(x @ wq.T, gain_q, eps).split(head_dim, dim=-1)]
    k = [rotary(k, positions) for k in rms_norm(x @ wk.T, gain_k, eps).split(head_dim, dim=-1)]
    v = heads_of(x, wv, head_dim)
    return softmax_attention(q, k, v, 1 / math.sqrt(head_dim)) @ wo.T


def ngpt_attention(x, wq, wk, wv, wo, head_dim, s_qk, eps=0.0):
    """`s_qk`: one slice of length head_dim per key head, the same for queries and keys.

    With as many key heads as heads that is the published vector of length H · head_dim; with fewer, the query heads
    that share a key share its slice.
    """
    positions = torch.arange(x.shape[-2], dtype=x.dtype)
    scales = s_qk.split(head_dim)
    q = [unit(rotary(q, positions), eps) for q in heads_of(x, wq, head_dim)]
    k = [unit(rotary(k, positions), eps) for k in heads_of(x, wk, head_dim)]
    q = [scales[h // (len(q) // len(k))] * q[h] for h in range(len(q))]
    k = [scales[h] * k[h] for h in range(len(k))]
    v = heads_of(x, wv, head_dim)
    return softmax_attention(q, k, v, math.sqrt(head_dim)) @ wo.T


def swiglu(x, w_gate, w_up, w_down):
    v = x @ w_gate.T
    return ((x @ w_up.T) * v * torch.sigmoid(v)) @ w_down.T


def ngpt_mlp(x, w_gate, w_up, w_down, s_u, s_v):
    """u ← s_u u, v ← s_v √d v, W_down (u ⊙ SiLU(v))."""
    u = s_u * (x @ w_up.T)
    v = s_v * math.sqrt(x.shape[-1]) * (x @ w_gate.T)
    return (u * v * torch.sigmoid(v)) @ w_down.T


# -- 3.10 HybridNorm -------------------------------------------------------------------------------------------------


def hybrid(x, blocks, gains, final, *, star=False, first=None, norm=rms_norm):
    """`gains`: one per block; `first`: gain of what attention reads in block 0 of HybridNorm*."""
    for k, (attention, mlp) in enumerate(blocks):
        if star and k == 0:
            y = x + attention(norm(x, first))
            x = y + mlp(norm(y, gains[k]))
        else:
            y = x + attention(x)
            z = norm(y, gains[k])
            x = z + mlp(z)
    return norm(x, final)


def hybrid_attention(x, wq, wk, wv, wo, head_dim, gain_q, gain_k, gain_v=None, eps=0.0):
    """RMSNorm with one gain for all heads on q, k and v, after the head split and before rotary.

    Without `gain_v` values stay as they are: the per-head QK-norm of 3.3.
    """
    positions = torch.arange(x.shape[-2], dtype=x.dtype)
    q = [rotary(rms_norm(q, gain_q, eps), positions) for q in heads_of(x, wq, head_dim)]
    k = [rotary(rms_norm(k, gain_k, eps), positions) for k in heads_of(x, wk, head_dim)]
    v = [v if gain_v is None else rms_norm(v, gain_v, eps) for v in heads_of(x, wv, head_dim)]
    return softmax_attention(q, k, v, 1 / math.sqrt(head_dim)) @ wo.T


# -- 3.11 KEEL, LayerScale -------------------------------------------------------------------------------------------


def keel(x, blocks, gains_in, gains_out, *, alpha=None, final=False, norm=rms_norm):
    """`gains_out[0]` is never looked at: the first block has no outer norm."""
    alpha = 2 * len(blocks) if alpha is None else alpha
    for k, (attention, mlp) in enumerate(blocks):
        if k == 0:
            x = x + attention(norm(x, gains_in[k][0]))
            x = x + mlp(norm(x, gains_in[k][1]))
        else:
            x = norm(alpha * x + attention(norm(x, gains_in[k][0])), gains_out[k][0])
            x = norm(alpha * x + mlp(norm(x, gains_in[k][1])), gains_out[k][1])
    return x if final is False else norm(x, final)


def layerscale(x, blocks, gains, gammas, final, *, norm=rms_norm):
    for k, (attention, mlp) in enumerate(blocks):
        x = x + gammas[k][0] * attention(norm(x, gains[k][0]))
        x = x + gammas[k][1] * mlp(norm(x, gains[k][1]))
    return norm(x, final)


# -- several streams: written with one tensor per stream and explicit sums over indices ------------------------------


def stream_logits(streams, fn, base, scales, sizes, eps):
    """Groups of logits from the flattened streams, with one scale for each group."""
    flat = torch.cat(streams, dim=-1)
    flat = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + eps)
    z, groups, at = flat @ fn.T, [], 0
    for scale, size in zip(scales, sizes, strict=True):
        groups.append(scale * z[..., at : at + size] + base[at : at + size])
        at += size
    return groups


def balanced(z, n, rounds, eps):
    """Sinkhorn on entries: comb[s][t] with rows s, columns t; columns are divided last."""
    z = [[z[..., s * n + t] for t in range(n)] for s in range(n)]
    comb = []
    for row in z:
        exps = [torch.exp(entry) for entry in row]
        comb.append([entry / sum(exps) + eps for entry in exps])

    def by_columns(m):
        sums = [sum(m[s][t] for s in range(n)) + eps for t in range(n)]
        return [[m[s][t] / sums[t] for t in range(n)] for s in range(n)]

    comb = by_columns(comb)
    for _ in range(rounds - 1):
        comb = by_columns([[entry / (sum(row) + eps) for entry in row] for row in comb])
    return comb


def mhc(x, blocks, logits, gains, head, final, *, n, rounds, magnitude, eps, mix_eps, mixing=True, norm=rms_norm):
    """`logits`: (fn, base, scales) per block and sublayer; `head`: the same for the exit, None for a mean."""

    def weigh(z, streams):
        return sum((torch.sigmoid(z[..., j : j + 1]) + mix_eps) * streams[j] for j in range(n))

    streams = [x] * n
    for k, branches in enumerate(blocks):
        for i, branch in enumerate(branches):
            pre, post, *comb = stream_logits(streams, *logits[k][i], [n, n, n * n][: 3 if mixing else 2], eps)
            f = branch(norm(weigh(pre, streams), gains[k][i]))
            post = magnitude * torch.sigmoid(post) + (0.0 if mixing else mix_eps)
            if mixing:
                square = balanced(comb[0], n, rounds, mix_eps)
                streams = [sum(square[s][t].unsqueeze(-1) * streams[s] for s in range(n)) for t in range(n)]
            streams = [streams[t] + post[..., t : t + 1] * f for t in range(n)]
    if head is None:
        return norm(sum(streams) / n, final)
    (pre,) = stream_logits(streams, *head, [n], eps)
    return norm(weigh(pre, streams), final)


def hc(x, blocks, static, gains, final, *, n, dynamic=None, tanh=True, norm=rms_norm):
    """`static`: (a, A, b) per block and sublayer; `dynamic`: (gain, w_a, W_A, w_b, s_α, s_β) likewise.

    Row s of the dynamic part comes from stream s alone: w_a and w_b have length D, W_A is (D, n).
    """

    def squash(z):
        return torch.tanh(z) if tanh else z

    streams = [x] * n
    for k, branches in enumerate(blocks):
        for i, branch in enumerate(branches):
            a, mix, b = static[k][i]
            read, write = [a[s] for s in range(n)], [b[t] for t in range(n)]
            mixed = [[mix[s, t] for t in range(n)] for s in range(n)]
            if dynamic is not None:
                gain, w_a, w_mix, w_b, s_alpha, s_beta = dynamic[k][i]
                for s in range(n):
                    normed = norm(streams[s], gain)
                    read[s] = read[s] + s_alpha * squash((normed * w_a).sum(-1, keepdim=True))
                    write[s] = write[s] + s_beta * squash((normed * w_b).sum(-1, keepdim=True))
                    mixed[s] = [
                        mixed[s][t] + s_alpha * squash((normed * w_mix[:, t]).sum(-1, keepdim=True)) for t in range(n)
                    ]
            f = branch(norm(sum(read[s] * streams[s] for s in range(n)), gains[k][i]))
            streams = [write[t] * f + sum(mixed[s][t] * streams[s] for s in range(n)) for t in range(n)]
    return norm(sum(streams), final)


def siamese(x, blocks, gains, last, *, hybrid=False, norm=rms_norm):
    """`gains`: (N_p, N_u, N_i) per block and sublayer, for attention of the hybrid form (c₁, N_u); `last`: of the exit.

    Post form of the vision code; hybrid form of the language code.
    """
    p, u = x, x
    for k, branches in enumerate(blocks):
        c = math.sqrt(2 * (k + 1))
        for i, branch in enumerate(branches):
            if hybrid and i == 0:
                c1, n_u = gains[k][i]
                f = branch(c1 * p + norm(u, n_u))
            else:
                n_p, n_u, n_i = gains[k][i]
                p = norm(p, n_p)
                f = branch(norm(p + norm(u, n_u), n_i))
            p, u = p + f / c, u + f
    return norm(norm(p, last[0]) + norm(u, last[1]), last[2])


def gated(x, blocks, reads, head, *, n, norm=rms_norm):
    """`reads`: (gain, W_down, W_up, W_inj) per block and sublayer, gain and matrices over all streams in a row.

    `head`: (gain, W_down, W_up) of the exit, which has no norm behind it.
    """
    D = x.shape[-1]

    def parts(row):
        return [row[..., j * D : (j + 1) * D] for j in range(n)]

    def look(streams, gain, down, up):
        gain, bias = gain if isinstance(gain, tuple) else (gain, None)
        normed = [norm(stream) * part for stream, part in zip(streams, parts(gain), strict=True)]
        if bias is not None:
            normed = [stream + part for stream, part in zip(normed, parts(bias), strict=True)]
        row = torch.cat(normed, dim=-1)
        u = row @ down.T / n
        gates = parts(1 / (1 + torch.exp(-((u / (1 + torch.exp(-u))) @ up.T))))
        return sum(g * y for g, y in zip(gates, normed, strict=True)) / n, row

    streams = [x] * n
    for k, branches in enumerate(blocks):
        for i, branch in enumerate(branches):
            *gate, inject = reads[k][i]
            h, row = look(streams, *gate)
            f, post = branch(h), 2 * torch.sigmoid(row @ inject.T / n)
            streams = [streams[t] + post[..., t : t + 1] * f for t in range(n)]
    return look(streams, *head)[0]


# -- gates, scalars and attention over depth -------------------------------------------------------------------------


def highway(x, blocks, gains_in, gains_out, gates, entry, final, *, variance=False, T=1.0, norm=rms_norm):
    """`gates`: (b, W) per block and sublayer, W None for a static gate; `entry`: gain, False for no norm there."""
    if entry is not False:
        x = norm(x, entry)
    for k, branches in enumerate(blocks):
        for i, branch in enumerate(branches):
            b, W = gates[k][i]
            t = torch.sigmoid((b if W is None else x @ W.T + b) / T)
            f = norm(branch(norm(x, gains_in[k][i])), gains_out[k][i])
            x = (torch.sqrt(torch.clamp(1 - t * t, min=1e-3)) if variance else 1 - t) * x + t * f
    return norm(x, final)


def lambdas(x, blocks, scalars, gains, entry, final, *, norm=rms_norm):
    """`scalars`: (λ_r, λ_0) per block; `entry`: gain of the embedding's norm, False for none."""
    x0 = x if entry is False else norm(x, entry)
    x = x0
    for k, (attention, mlp) in enumerate(blocks):
        x = scalars[k][0] * x + scalars[k][1] * x0
        x = x + attention(norm(x, gains[k][0]))
        x = x + mlp(norm(x, gains[k][1]))
    return norm(x, final)


def attnres(x, blocks, queries, gains, head, final, *, length, norm=rms_norm, key_norm=rms_norm):
    """`queries`: (w, gain of the keys) per block and sublayer, never looked at where there is one source; `head`: the
    same for the exit. `length`: sublayers in a group.
    """

    def look(sources, w, gain):
        if len(sources) == 1:
            return sources[0]
        weights = [torch.exp((w * key_norm(V, gain)).sum(-1, keepdim=True)) for V in sources]
        return sum(a * V for a, V in zip(weights, sources, strict=True)) / sum(weights)

    finished, partial, done = [x], None, 0
    for k, branches in enumerate(blocks):
        for i, branch in enumerate(branches):
            if done % length == 0 and partial is not None:
                finished, partial = [*finished, partial], None
            h = look(finished if partial is None else [*finished, partial], *queries[k][i])
            f = branch(norm(h, gains[k][i]))
            partial = f if partial is None else partial + f
            done += 1
    return norm(look([*finished, partial], *head), final)
