"""The assumptions of the estimators in words, with their constants, for pages and JSON."""

from __future__ import annotations

from normlab.ladders.statistics import baseline
from normlab.ladders.statistics.estimators import layout, noise, simple_law, smooth


def priors_in_words() -> dict[str, str]:
    """Names and texts."""
    return {
        "smooth": (
            f"the gap changes smoothly, in whatever form: level sd {smooth.LEVEL_SD} nats at the top; path: slope sd "
            f"{smooth.SLOPE_SD} an e-fold of compute, integrated Wiener process with bends {_list(smooth.PATH_BENDS)}, "
            "twice as fast with one size or one budget; aside of the path a slope and a bend that no cell shows; "
            f"grid: slope sd {smooth.GRID_SLOPE_SD} an e-fold of size and of tokens, four processes (size, tokens, "
            f"compute, tokens per parameter), each with bends {_list(smooth.GRID_BENDS)} nats an e-fold^1.5; equal "
            "weights; bends see budgets below the top's drawn apart by as much as seeds scatter more there, "
            f"{layout.MOST_STRETCHED:g}-fold at most"
        ),
        "simple_law": (
            "the gap keeps a simple law: c^-γ(a + b ln c) or a + b c^-γ, γ up to 0.6, in compute; on a grid also in "
            f"mixtures of compute with tokens or parameters; sd of a {simple_law.LEVEL_SD}, of b {simple_law.SLOPE_SD} "
            "an e-fold"
        ),
        "noise": (
            "sd over seeds pooled over cells, averaged over its own error; constant (prior probability "
            f"{noise.CONSTANT_WEIGHT:g}) or a power of tokens (exponent sd {noise.EXPONENT_SD:g}) between "
            "budgets with several seeds, and as at the nearest of these elsewhere; a rung's effect on "
            f"the scheme alone half-normal with scale {noise.RUNG_SCALE} nats; branches of a trunk correlated as their "
            f"seeds show (with {noise.BRANCH_CORRELATION} as {noise.BRANCH_DF:g} degrees of freedom; "
            f"± {noise.BRANCH_ERROR}); with few seeds an sd of {noise.ASSUMED_SEED_SD} counts as "
            f"{noise.ASSUMED_DF:g} degrees of freedom"
        ),
        "baseline": (
            f"exponents from {baseline.EXPONENTS[0]:.2f} to {baseline.EXPONENTS[-1]:.2f}, equal weight; the slope is "
            "taken along the path, on a grid at constant tokens per parameter"
        ),
    }


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
