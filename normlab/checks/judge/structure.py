"""Verdicts on the structural tests: untrained parameters, leaks, missing norms, skip gains and the first loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from normlab.checks.judge.blame import blame
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Level, Verdict, unmeasured, worst
from normlab.checks.structure.gradients import LAST_STEPS, GradientTrace
from normlab.checks.structure.inspect import Structure
from normlab.checks.structure.leaks import Leak
from normlab.probes.blocks import BlockStack
from normlab.probes.start import Start, echoes, worst_start

_OFF = "larger than the state's square switches the norm off"

_SHOWN = 3
"""Largest number of parameters that are named."""


def structural(
    found: Sequence[Structure], trace: GradientTrace, limits: Thresholds, *, has_head: bool
) -> list[Verdict]:
    """The verdicts on one live model, stack by stack, and on its burst; empty if the model was not inspected."""
    if not found:
        return []
    # Of equals the latest counts: the stack with most blocks comes first.
    stacks = list(reversed(found))
    return [
        worst([untrained(one, trace, has_head=has_head) for one in stacks]),
        leaks(found[0], limits),
        worst([structure(one, limits) for one in stacks]),
    ]


def untrained(found: Structure, trace: GradientTrace, *, has_head: bool) -> Verdict:
    """Verdict on untrained parameters, and on branches that pass no gradient back."""
    if not trace.steps:
        return unmeasured("untrained", "no step was taken")
    never = _inside(trace.never, found.stack)
    if never:
        return _untrained(never, len(trace.last), found.stack, "fail", "never get a gradient")
    if found.cuts:
        return _detached(found)
    # Without a head of the model's own, what would have fed one is idle.
    if has_head and trace.never:
        return _untrained(trace.never, len(trace.last), found.stack, "warn", "never get a gradient")
    if trace.lost:
        late = f"had no gradient in the last {LAST_STEPS} steps"
        return _untrained(trace.lost, len(trace.last), found.stack, "warn", late)
    words = f"0 of {len(trace.last)} parameters without a gradient in {trace.steps} steps (0 is the limit)"
    return Verdict(name="untrained", finding="fine", level="ok", value=0.0, threshold=0.0, words=words)


def _untrained(names: Sequence[str], total: int, stack: BlockStack, level: Level, words: str) -> Verdict:
    layers = tuple(sorted({place for name in names if (place := stack.block_of(name)) is not None}))
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    words = f"{len(names)} of {total} parameters {words} (0 is the limit): {shown}"
    count, module = float(len(names)), _module(names, stack)
    return _bad_verdict("untrained", "untrained", level, (count, 0.0), words, stack, layers=layers, module=module)


def _detached(found: Structure) -> Verdict:
    layers = tuple(found.cuts)
    count = sum(map(len, found.cuts.values()))
    branch = found.cuts[layers[0]][0]
    words = f"no gradient passes {count} branches (0 is the limit), which read a detached state: {branch}"
    module = f"{found.stack.names[layers[0]]}.{branch}"
    return _bad_verdict(
        "untrained", "detached", "fail", (float(count), 0.0), words, found.stack, layers=layers, module=module
    )


def leaks(found: Structure, limits: Thresholds) -> Verdict:
    """Verdict on leaks: whether an output changes with a later token or with another sample."""
    seen = [leak for leak in (found.future, found.batch) if leak is not None]
    if not seen:
        return unmeasured("leaks", found.missing.get("leaks", ""))
    bad = next((leak for leak in seen if leak.share > limits.leak and leak.module), None)
    if bad is not None:
        return _leaking(bad, found, limits)
    largest = max(seen, key=lambda leak: leak.share)
    what = "a later token or another sample" if found.future else "another sample"
    words = f"outputs move by {largest.share:.2g} of a change in {what} ({limits.leak:g} is the limit)"
    return Verdict(name="leaks", finding="fine", level="ok", value=largest.share, threshold=limits.leak, words=words)


def _leaking(leak: Leak, found: Structure, limits: Thresholds) -> Verdict:
    future = leak.kind == "future"
    # In a decoder a batch norm shows the future.
    meant = not future and leak.is_batch_norm and found.must_hide is not True
    unsure = future and found.must_hide is None
    layers = tuple(place for place in [found.stack.block_of(leak.module)] if place is not None)
    what = "a later token" if future else "another sample of the batch"
    words = f"outputs move by {leak.share:.2g} of a change in {what} ({limits.leak:g} is the limit), from {leak.module}"
    words += " on: right for an encoder, wrong for a model that predicts the next token" if unsure else " on"
    finding, level = "sees the future" if future else "mixes samples", "warn" if meant or unsure else "fail"
    measured = leak.share, limits.leak
    return _bad_verdict("leaks", finding, level, measured, words, found.stack, layers=layers, module=leak.module)


def structure(found: Structure, limits: Thresholds) -> Verdict:
    """Verdict on structure: whether branches and head have a norm before them, and skips gain 1."""
    if not any(found.scalings):
        return unmeasured("structure", found.missing.get("structure", "no block could be run by itself"))
    for rule in (_no_norm, _norm_off, _skip_gain, _no_final_norm, _final_norm_off):
        verdict = rule(found, limits)
        if verdict is not None:
            return verdict
    gains = [scaling.gain for scaling in found.scalings if scaling and scaling.gain is not None]
    skip = f"skips of gain {max(gains, key=lambda gain: abs(gain - 1.0)):.3f} (1 is right)" if gains else "no bare skip"
    exponent = max(scaling.exponent for scaling in found.scalings if scaling)
    words = f"branches grow like the state to the power {abs(exponent):.2f} ({limits.norm_exponent:g} is the limit)"
    return Verdict(
        name="structure",
        finding="fine",
        level="ok",
        value=exponent,
        threshold=limits.norm_exponent,
        words=f"{words}, {skip}",
    )


def _no_norm(found: Structure, limits: Thresholds) -> Verdict | None:
    bare = {k: one for k, one in enumerate(found.scalings) if one and not one.has_norm(limits.norm_exponent)}
    if not bare:
        return None
    layers, largest = tuple(bare), max(one.exponent for one in bare.values())
    branches = list(dict.fromkeys(name for one in bare.values() for name in one.branches))
    named = f" ({', '.join(branches)})" if branches else ""
    words = f"no norm between the state and a branch{named}: what it adds grows like the state to the power "
    words += f"{largest:.2f} ({limits.norm_exponent:g} is the limit, 0 with a norm)"
    module, measured = ".".join([found.stack.names[layers[0]], *branches[:1]]), (largest, limits.norm_exponent)
    return _bad_verdict("structure", "no norm", "fail", measured, words, found.stack, layers=layers, module=module)


def _norm_off(found: Structure, limits: Thresholds) -> Verdict | None:
    own = {k: one.own for k, one in enumerate(found.scalings) if one and one.own}
    off = {k: names for k, one in own.items() if (names := [name for name in one if one[name] > limits.own_exponent])}
    if not off:
        return None
    layers, largest = tuple(off), max(max(own[k].values()) for k in off)
    branches = list(dict.fromkeys(name for names in off.values() for name in names))
    words = f"at the state's own size {', '.join(branches)} grow{'' if branches[1:] else 's'} like it to the power "
    words += f"{largest:.2f} ({limits.own_exponent:g} is the limit, 0 with a norm), far above it not: an epsilon {_OFF}"
    module, measured = f"{found.stack.names[layers[0]]}.{branches[0]}", (largest, limits.own_exponent)
    return _bad_verdict("structure", "norm off", "fail", measured, words, found.stack, layers=layers, module=module)


def _final_norm_off(found: Structure, limits: Thresholds) -> Verdict | None:
    exponent, far = found.own_logit_exponent, found.logit_exponent
    if exponent is None or exponent <= limits.norm_exponent or far is None or far > limits.norm_exponent:
        return None
    words = f"at the size of the last state logits grow like it to the power {exponent:.2f} "
    words += f"({limits.norm_exponent:g} is the limit, 0 with a norm), far above it not: an epsilon {_OFF}"
    measured, module = (exponent, limits.norm_exponent), found.stack.names[-1]
    return _bad_verdict("structure", "norm off", "fail", measured, words, found.stack, layers=(), module=module)


def _skip_gain(found: Structure, limits: Thresholds) -> Verdict | None:
    gains = {k: one.gain for k, one in enumerate(found.scalings) if one and one.gain is not None}
    off = {k: gain for k, gain in gains.items() if abs(gain - 1.0) > limits.skip_gain}
    if not off:
        return None
    total = math.prod(off.values())
    furthest = max(off.values(), key=lambda gain: abs(math.log(abs(gain))))
    words = f"the skip multiplies the state by {furthest:.3g} in a block (1 is right) and by {total:.3g} in all "
    words += f"({limits.skip_low:g} to {limits.skip_high:g} is borne)"
    layers, level = tuple(off), "warn" if limits.skip_low <= abs(total) <= limits.skip_high else "fail"
    module = found.stack.names[layers[0]]
    return _bad_verdict(
        "structure", "skip gain", level, (furthest, 1.0), words, found.stack, layers=layers, module=module
    )


def _no_final_norm(found: Structure, limits: Thresholds) -> Verdict | None:
    exponent, last = found.logit_exponent, found.scalings[-1]
    if exponent is None or exponent <= limits.norm_exponent:
        return None
    if last is None or last.bounds_state(limits.norm_exponent):
        return None
    words = f"no norm between the last block and the head: logits grow like the state to the power {exponent:.2f} "
    words += f"({limits.norm_exponent:g} is the limit, 0 with a norm)"
    measured, module = (exponent, limits.norm_exponent), found.stack.names[-1]
    return _bad_verdict("structure", "no final norm", "fail", measured, words, found.stack, layers=(), module=module)


def start_verdict(starts: Sequence[Start], missing: str, limits: Thresholds, *, fresh: bool) -> Verdict | None:
    """Verdict on the initial loss, against that of uniform guessing; None without token inputs or a vocabulary."""
    judged = [start for start in starts if start.judged]
    if not judged:
        return unmeasured("start", missing) if missing else None
    start = worst_start(judged, limits.start_margin)
    if not start.is_finite:
        words = f"first loss is not finite with {_head(start)}, {start.name}"
        return Verdict(name="start", finding="not finite", level="fail" if fresh else "warn", words=words)
    echo, high = echoes(start, limits.start_read), start.is_far_above(limits.start_margin)
    tied = next((one for one in starts if not one.judged), None)
    would = tied is not None and (echoes(tied, limits.start_read) or tied.is_far_above(limits.start_margin))
    finding = "echo" if echo else "high first loss" if high else "needs its own head" if would else "fine"
    more = f"; a tied head would start at {tied.loss:.2f}, {tied.read:.2g} on the token read" if tied and would else ""
    more += f"; {missing}" if missing else ""
    return Verdict(
        name="start",
        finding=finding,
        level="ok" if not (echo or high) else "fail" if fresh else "warn",
        value=start.read if echo else start.loss,
        threshold=limits.start_read if echo else start.limit(limits.start_margin),
        module=start.head if echo or high else "",
        words=_start_words(start, limits) + more,
    )


def _start_words(start: Start, limits: Thresholds) -> str:
    return (
        f"first loss {start.loss:.2f} ({start.limit(limits.start_margin):.2f} is the limit, ln {start.vocabulary} = "
        f"{start.guess:.2f}), {start.read:.2g} on the token read ({limits.start_read:g} is the limit) with "
        f"{_head(start)}, {start.name}"
    )


def _head(start: Start) -> str:
    return "a tied head" if start.tied else "a head of its own"


def _bad_verdict(
    name: str,
    finding: str,
    level: Level,
    measured: tuple[float, float],
    words: str,
    stack: BlockStack,
    *,
    layers: tuple[int, ...],
    module: str,
) -> Verdict:
    """A verdict that is not ok: `measured` is the value and its threshold, `layers` and `module` are to blame."""
    value, threshold = measured
    words += blame(layers, len(stack.blocks))
    return Verdict(
        name=name,
        finding=finding,
        level=level,
        value=value,
        threshold=threshold,
        layers=layers,
        module=module,
        words=words,
    )


def _inside(names: Sequence[str], stack: BlockStack) -> list[str]:
    return [name for name in names if stack.block_of(name) is not None]


def _module(names: Sequence[str], stack: BlockStack) -> str:
    """The module, one level below a block, that most of these parameters belong to."""
    place = stack.block_of(names[0])
    if place is None:
        return names[0].rpartition(".")[0]
    prefix = stack.names[place]
    parts = Counter(name.removeprefix(f"{prefix}.").split(".")[0] for name in names if stack.block_of(name) == place)
    return f"{prefix}.{parts.most_common(1)[0][0]}"
