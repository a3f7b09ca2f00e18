"""Claims: every statement of the abstracts, this artifact's number beside it, and the verdict.

A *verdict* says whether a statement holds here; "does not hold" is a result like any other. A *check* guards the
artifact: the number is there, finite, and leads to the verdict recorded in data/claims.json. Tolerances stand in that
file with their reasons, fixed before the numbers were computed.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .problem import InputError, read_json

HOLDS, FAILS, UNTESTABLE = VERDICTS = ("holds", "does not hold", "not testable here")

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Words = Annotated[str, Field(min_length=1)]


class Claim(BaseModel):
    """One statement. It holds where paper_low - tolerance <= number <= paper_high + tolerance; a bound that is null
    does not bind, and a claim with neither bound is not testable here (tolerance_reason says why).

    statement: the abstract's words; source: which abstract
    measure: what is measured, in one phrase; unit: of the number, the bounds and the tolerance
    notebook, command: where the number comes from and how to recompute it
    expected_verdict: the verdict on record for a full run; another one breaks the check
    wall_time: the number is a time measured on this machine, kept apart from the tables that are equal in all runs
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: _Words
    statement: _Words
    source: _Words
    measure: _Words
    unit: str
    paper_low: _Finite | None
    paper_high: _Finite | None
    tolerance: Annotated[_Finite, Field(ge=0)]
    tolerance_reason: _Words
    expected_verdict: Literal[VERDICTS]
    notebook: _Words
    command: _Words
    wall_time: bool = False

    @property
    def testable(self) -> bool:
        return self.paper_low is not None or self.paper_high is not None

    @property
    def bound(self) -> str:
        """What the number is held to, as text: 17.975 %, 16 to 25 %, at most 36 ms. Where the abstracts give no number
        it is this artifact's reading, for which the tolerance gives the reason."""
        low, high = self.paper_low, self.paper_high
        if not self.testable:
            return "-"
        if low == high:
            text = f"{low:g}"
        elif low is None:
            text = f"at most {high:g}"
        elif high is None:
            text = f"at least {low:g}"
        else:
            text = f"{low:g} to {high:g}"
        return f"{text} {self.unit}".strip()

    @model_validator(mode="after")
    def _consistent(self):
        if None not in (self.paper_low, self.paper_high) and self.paper_low > self.paper_high:
            raise ValueError(f"paper_low {self.paper_low:g} is over paper_high {self.paper_high:g}")
        if self.testable == (self.expected_verdict == UNTESTABLE):
            raise ValueError(f"expected_verdict {self.expected_verdict!r} with bounds {self.paper_low}, "
                             f"{self.paper_high}; allowed: {UNTESTABLE!r} exactly where both bounds are null")
        return self


class _ClaimsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    claims: list[Claim]


@dataclass(frozen=True)
class Judged:
    """A claim's number in this run (None where it is not testable), how it came about in a few words, the verdict."""

    claim: Claim
    number: float | None
    detail: str
    verdict: str


def read_claims(path) -> list[Claim]:
    """The claims of data/claims.json. Raises InputError."""
    claims = read_json(path, _ClaimsFile).claims
    ids = [claim.id for claim in claims]
    twice = [name for name in ids if ids.count(name) > 1]
    if twice:
        raise InputError(f"{path}: id {twice[0]!r} twice; allowed: every id once")
    return claims


def judge(claim: Claim, number: float | None, detail: str = "") -> Judged:
    """The verdict on one claim. Raises InputError where a testable claim has no finite number."""
    if not claim.testable:
        return Judged(claim, None, detail, UNTESTABLE)
    if number is None or not math.isfinite(number):
        raise InputError(f"claim {claim.id}: number {number}; allowed: a finite number")
    low = -math.inf if claim.paper_low is None else claim.paper_low - claim.tolerance
    high = math.inf if claim.paper_high is None else claim.paper_high + claim.tolerance
    return Judged(claim, float(number), detail, HOLDS if low <= number <= high else FAILS)


def judge_all(claims: list[Claim], numbers: dict[str, tuple[float, str]]) -> list[Judged]:
    """Judge every claim from numbers {id: (number, detail)}. Raises InputError for an id that no testable claim has,
    and for a testable claim without its number."""
    unknown = set(numbers) - {claim.id for claim in claims if claim.testable}
    if unknown:
        raise InputError(f"number for claim {min(unknown)!r}; allowed: the ids of testable claims")
    return [judge(claim, *numbers.get(claim.id, (None, ""))) for claim in claims]


def to_json(judged: list[Judged]) -> str:
    """The text of a run's claims.json, which `broken_checks` reads back."""
    rows = [{"id": j.claim.id, "number": j.number, "detail": j.detail, "verdict": j.verdict} for j in judged]
    return json.dumps(rows, indent=1)


def broken_checks(claims: list[Claim], path: Path, compare_verdicts: bool) -> list[str]:
    """One line for every check that breaks in the claims.json of a run: a claim without its row, a number that is not
    finite, a verdict that does not follow from the number, and (compare_verdicts) one that is not the one on record."""
    rows = {row["id"]: row for row in json.loads(Path(path).read_text(encoding="utf-8"))}
    broken = []
    for claim in claims:
        row = rows.get(claim.id)
        if row is None:
            broken.append(f"claim {claim.id}: absent from {path.name}")
            continue
        try:
            verdict = judge(claim, row["number"]).verdict
        except InputError as error:
            broken.append(str(error))
            continue
        if row["verdict"] != verdict:
            broken.append(f"claim {claim.id}: verdict {row['verdict']!r} does not follow from {row['number']}")
        elif compare_verdicts and verdict != claim.expected_verdict:
            broken.append(f"claim {claim.id}: verdict {verdict!r} (number {row['number']:g}), on record is "
                          f"{claim.expected_verdict!r}")
    return broken
