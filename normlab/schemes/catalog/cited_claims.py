"""Claims that the card of a scheme cites, with their verdicts; `make docs` writes them to cited_claims.json.

They are read from that file because judging all studies takes seconds, and needs rows that only a checkout has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from normlab.utils.files import read_json
from normlab.utils.records import from_plain

Role = Literal["subject", "compared"]
"""Whether something is claimed of a scheme, or of another that is compared with it."""
ROLES: tuple[Role, ...] = get_args(Role)
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, kw_only=True)
class CitedClaim:
    """A claim that has a verdict."""

    study: str
    mark: str
    verdict: str
    claim: str
    schemes: dict[str, Role]
    """Schemes (and experiments) whose runs decide it, without options."""


def cited_claims(scheme: str) -> dict[Role, list[CitedClaim]]:
    """The claims that name a scheme, by its role in them; a role without claims is left out."""
    claims = from_plain(list[CitedClaim], read_json(FILE), FILE.name)
    found: dict[Role, list[CitedClaim]] = {}
    for role in ROLES:
        if own := [claim for claim in claims if claim.schemes.get(scheme) == role]:
            found[role] = own
    return found
