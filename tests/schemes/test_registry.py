"""Schemes by name: aliases, options in text, plug-ins, and errors that help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

import normlab
from normlab import NormLabError
from normlab.schemes import Add, Scheme, Step
from normlab.schemes.catalog import registry
from normlab.schemes.pre import Pre

NAMED = (
    "attnres deepnorm dual gated geonorm hc highway hybrid keel lambdas layerscale lns mhc mix ngpt none output peri"
    " post pre siamese spannorm"
)


@dataclass(frozen=True, kw_only=True)
class Plain(Scheme):
    """Plain: adds."""

    name = "plain-add"
    aliases = ("plain-sum",)

    def sublayer(self, site):
        return Step(Add())


def test_the_schemes_of_the_literature_are_there():
    assert normlab.list_schemes() == NAMED.split()


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("sandwich", "peri"),
        ("pre-ln", "pre"),
        ("Pre_LN", "pre"),
        ("ResiDual", "dual"),
        ("ln-scaling", "lns"),
        ("GeoNorm", "geonorm"),
        (" swin-v2 ", "output"),
    ],
)
def test_names_people_type(typed, name):
    assert normlab.scheme(typed).name == name


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("geonorm(max_angle=pi/8)", math.pi / 8),
        ("geonorm(max_angle='pi/8')", math.pi / 8),
        ("geonorm(max_angle=π/8)", math.pi / 8),
        ('geonorm(max_angle="π / 2")', math.pi / 2),
        ("geonorm(max_angle=PI)", math.pi),
        ("geonorm(max_angle=3*pi/8)", 3 * math.pi / 8),
        ("geonorm(max_angle='3pi/8')", 3 * math.pi / 8),
        ("geonorm(max_angle=0.5*pi)", 0.5 * math.pi),
    ],
)
def test_angles_are_multiples_of_pi(typed, value):
    scheme, number = normlab.scheme(typed), normlab.scheme("geonorm", max_angle=value)
    assert scheme.max_angle == value
    assert (scheme, hash(scheme), str(scheme)) == (number, hash(number), str(number))
    assert normlab.scheme(str(scheme)) == scheme


def test_the_names_of_stored_runs_stay():
    for spec in ("geonorm", "geonorm(max_angle=pi/4)", "geonorm(max_angle='π/4', order=clamp-first)"):
        assert str(normlab.scheme(spec)) == "geonorm"
    assert str(normlab.scheme("geonorm(max_angle=pi/8)")) == f"geonorm(max_angle={math.pi / 8!r})"
    assert str(normlab.scheme("geonorm(order=decay-first)")) == "geonorm(order='decay-first')"


@pytest.mark.parametrize(
    ("typed", "spec"),
    [
        ("rezero", "layerscale(gamma=0.0, scalar=True)"),
        ("OLMo2", "output(qk_norm='flat')"),
        ("gemma-2", "peri(gain='offset', entry_norm=False)"),
        ("gemma2(step=0.5)", "peri(gain='offset', step=0.5, entry_norm=False)"),
        ("olmo2(qk_norm=head)", "output(qk_norm='head')"),
    ],
)
def test_names_that_stand_for_options(typed, spec):
    assert normlab.scheme(typed) == normlab.scheme(spec)


def test_options_in_text_and_in_code_are_the_same():
    assert normlab.scheme("peri(step=0.1, gain='offset')") == normlab.scheme("peri", step=0.1, gain="offset")
    assert normlab.scheme("geonorm(decay=sqrt)") == normlab.scheme("geonorm", decay="sqrt")
    assert normlab.scheme("deepnorm(alpha=None)") == normlab.scheme("deepnorm")
    assert normlab.scheme(normlab.scheme("peri"), step=0.5) == normlab.scheme("peri", step=0.5)
    assert str(normlab.scheme("keel", alpha="sqrt")) == "keel(alpha='sqrt')"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normlab.scheme("peery"), "unknown scheme 'peery'; did you mean 'peri'"),
        (lambda: normlab.scheme("pre,peri"), "'pre,peri' are 2 schemes, expected one; .* write pre peri"),
        (lambda: normlab.scheme("sandwhich"), "did you mean 'sandwich'"),
        (lambda: normlab.scheme("peri", stp=0.1), "unknown option of peri 'stp'; did you mean 'step'"),
        (lambda: normlab.scheme(normlab.scheme("peri"), stp=0.1), "unknown option of peri 'stp'"),
        (lambda: normlab.scheme("peri(0.1)"), "cannot read scheme"),
        (lambda: normlab.scheme("peri(step=0.1"), "cannot read scheme"),
        (lambda: normlab.scheme("peri(**{})"), "cannot read scheme"),
        (lambda: normlab.scheme("peri(step=__import__('os'))"), "cannot read scheme"),
        (lambda: normlab.scheme(3), "expected a scheme or its name, got int"),
        (lambda: normlab.scheme("peri", step=2.0), "step must lie in"),
        (lambda: normlab.scheme("peri", step="big"), "step must be a number"),
        (lambda: normlab.scheme("geonorm", decay="cubic"), "decay must be one of 'harmonic'"),
        (lambda: normlab.scheme("geonorm", learned=1), "learned must be of type bool"),
        (lambda: normlab.scheme("pre", eps=-1.0), "eps must not be negative"),
        (lambda: normlab.scheme("pre", cut=0), "cut must be positive"),
        (lambda: normlab.scheme("keel", alpha="cubic"), "unknown alpha rule of keel"),
        (lambda: normlab.scheme("keel", alpha=-1.0), "alpha must be positive"),
        (lambda: normlab.scheme("deepnorm", beta=0.0), "beta must be positive"),
        (lambda: normlab.scheme("deepnorm", decoder_depth=-1), "decoder_depth must not be negative"),
        (lambda: normlab.scheme("mix", post_fraction=1.5), "post_fraction must lie in"),
        (lambda: normlab.scheme("ngpt", alpha=0.0), "alpha must lie in"),
        (lambda: normlab.scheme("dual", scale=0.0), "scale must be positive"),
        (lambda: normlab.scheme("geonorm", max_angle=4.0), "max_angle must lie in"),
        (lambda: normlab.scheme("geonorm(max_angle=2*pi)"), "max_angle must lie in"),
        (lambda: normlab.scheme("geonorm", max_angle="pi/x"), "max_angle must be a number .*pi/8.*'pi/x'"),
        (lambda: normlab.scheme("geonorm", max_angle="pi/0"), "max_angle must be a number"),
        (lambda: normlab.scheme("geonorm(max_angle=1/8)"), "cannot read scheme"),
        (lambda: normlab.scheme("geonorm(order=decay-last)"), "order must be one of 'clamp-first', 'decay-first'"),
        (lambda: normlab.scheme("geonorm", step=0.0), "step must be positive"),
        (lambda: normlab.scheme("peri", output_gain=0.0), "output_gain must be positive"),
        (lambda: normlab.scheme("peri", output_gain=0.5, gain="none"), "output_gain needs a gain"),
        (lambda: normlab.scheme("layerscale", gamma=float("nan")), "gamma must be finite"),
        (lambda: normlab.scheme("geonorm", step=math.nan), "step must be finite, got nan; try 1.0"),
        (lambda: normlab.scheme("geonorm(step=1e999)"), "step must be finite, got inf"),
        (lambda: normlab.scheme("pre", eps=math.nan), "eps must be finite"),
        (lambda: normlab.scheme("pre", cut=math.inf), "cut must be finite"),
        (lambda: normlab.scheme("mhc", magnitude=math.nan), "magnitude must be finite"),
        (lambda: normlab.scheme("keel", alpha=math.inf), "alpha must be finite, got inf; try sublayers"),
        (lambda: normlab.scheme("highway", gate_bias=10**400), "gate_bias must be finite"),
        (lambda: normlab.scheme("deepnorm", alpha="two"), "alpha must be a number .* or None, got 'two'; leave it out"),
        (lambda: normlab.scheme("deepnorm", beta=True), "beta must be a number .* or None, got True"),
        (lambda: normlab.scheme("keel", alpha=None), "alpha must be a number .* or text, got None"),
        (lambda: normlab.scheme("ngpt", alpha_scaling=[1]), "alpha_scaling must be a number"),
        (lambda: normlab.scheme("ngpt", alpha_scaling=0.0), "alpha_scaling must be positive, got 0.0; leave it out"),
        (lambda: normlab.scheme("dual", final_eps=-1e-7), "final_eps must not be negative"),
        (lambda: normlab.scheme("pre").bind(depth=0, dim=8), "must be at least 1"),
        (lambda: normlab.scheme("pre").bind(depth=2, dim=8, first=2), "first must lie in"),
        (lambda: normlab.scheme("pre").bind(depth=2, dim=8).block(2), "block 2 is out of range"),
        (lambda: normlab.scheme("pre").bind(depth=4, dim=8, first=2).block(2), "block 2 is out of range"),
        (lambda: normlab.scheme("pre").bind(depth=2, dim=8, topology="ring"), "unknown topology 'ring'"),
        (lambda: registry.register(int), "is not a scheme"),
    ],
)
def test_bad_input_gets_one_clear_line(call, message):
    with pytest.raises(NormLabError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_plug_ins_are_found_by_entry_point(monkeypatch):
    point = EntryPoint(name="plain", value=f"{__name__}:Plain", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    registry._load_plugins.cache_clear()
    try:
        assert "plain-add" in normlab.list_schemes()
        assert isinstance(normlab.scheme("Plain_Sum"), registry.find_class("plain-add"))
    finally:
        registry.unregister(registry.find_class("plain-add"))
        registry._load_plugins.cache_clear()
        monkeypatch.undo()
    assert normlab.list_schemes() == NAMED.split()


def test_a_name_is_taken_once():
    @dataclass(frozen=True, kw_only=True)
    class Impostor(Pre):
        """Impostor: not pre."""

        aliases = ()

    with pytest.raises(NormLabError, match="scheme name 'pre' is taken by Pre"):
        normlab.register(Impostor)


def test_registering_makes_a_scheme_usable_everywhere():
    normlab.register(Plain)
    try:
        assert normlab.DecoderConfig(scheme="plain-sum").scheme == Plain()
    finally:
        registry.unregister(Plain)
    with pytest.raises(NormLabError, match="unknown scheme"):
        normlab.scheme("plain-sum")


def test_unknown_names_of_the_package_raise():
    with pytest.raises(AttributeError, match="no attribute 'decoder'"):
        _ = normlab.decoder
    assert {"Decoder", "Stack", "scheme", "schemes", "geometry", "ops"} <= set(dir(normlab))
