"""The headline results of the four papers that studies test, by number, as docs/claims.md lists them."""

from __future__ import annotations

RESULTS_TESTED: dict[int, str] = {
    1: "GeoNorm beats Pre-Norm and Post-Norm at 125M, on books and on scientific text; trend to 350M and 1.3B",
    2: "GeoNorm's gap stays at lengths 512, 1024 and 2048",
    3: "GeoNorm's clamp: π/4 is the best of π/8, π/4 and π/2",
    4: "GeoNorm's decay: harmonic beats sqrt, linear and none; learned map and order of the steps",
    5: "GeoNorm's overhead is negligible",
    6: "GeoNorm has no loss spikes",
    7: "Open questions of GeoNorm: 100 layers, encoders and vision, does concentration predict the loss",
    8: "SpanNorm beats Pre-Norm, dense",
    9: "SpanNorm beats Pre-Norm with experts",
    10: "SpanNorm trains at 128 layers, where Post-Norm fails",
    11: "ScaleInit is what prevents vanishing gradients",
    12: "One learning rate serves SpanNorm, up to 8e-3",
    13: "SpanNorm's learning rates carry over width",
    14: "Attention dynamics: velocities, tails, random weights, synchronisation",
    15: "Peri-LN uses its depth best",
    16: "Pre-Norm's state grows more without weight decay (said to be without bound); Peri-LN's is bounded",
    17: "Peri-LN with a step of 0.1 beats a step of 1",
    18: "Pre-Norm diverges at high rates and low decay, Peri-LN does not",
    19: "The output's sensitivity to its input stays under its bound",
    20: "Pre-Norm explodes while Post-Norm's gradients flow better",
}
