"""Run golden cases: what other resolvers gave for the same choices, compared exactly, deviations named.

A case is one JSON object a line. Where the command as published is not the golden one, the difference is unexplained.
Where it is, but we refuse or correct it, the rule that does so is the deviation.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdcluster.errors import UserError
from pdcluster.recipes.checks import PUBLISHED_FAULTS
from pdcluster.recipes.choice import Choice, PoolChoice, select
from pdcluster.recipes.library import Library
from pdcluster.recipes.offer_line import offer_line
from pdcluster.recipes.resolve import resolve

_SHOWN = 3


@dataclass(slots=True)
class Deviation:
    """One rule by which we deviate: why, how many cases, and the first few."""

    reason: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What became of a golden file: every case is exact, deviates by its first rule, or is unexplained."""

    total: int = 0
    exact: int = 0
    deviations: dict[str, Deviation] = field(default_factory=dict)
    unexplained: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        deviations = [
            {"rule": rule, "reason": found.reason, "count": found.count, "examples": found.examples}
            for rule, found in sorted(self.deviations.items())
        ]
        return {
            "total": self.total,
            "exact": self.exact,
            "deviations": deviations,
            "unexplained": self.unexplained,
        }

    def deviate(self, rule: str, case: str) -> None:
        """Count a case under a rule."""
        found = self.deviations.setdefault(rule, Deviation(PUBLISHED_FAULTS[rule]))
        found.count += 1
        if len(found.examples) < _SHOWN:
            found.examples.append(case)


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Read a golden file, gzipped or not; raises `UserError` with the line where it is broken."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as (gzipped) JSON lines: {error}") from error
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(case, dict) or not isinstance(case.get("id"), str) or "model" not in case:
            raise UserError(f"{path}:{number}: not a golden case: an object with id and model is needed")
        cases.append(case)
    return cases


def verify(cases: list[dict[str, Any]], library: Library) -> Verdict:
    """Compare every case with what we resolve."""
    verdict = Verdict()
    results = {case["id"]: case["result"] for case in cases if "result" in case}
    for case in cases:
        verdict.total += 1
        try:
            _judge(case, results, library, verdict)
        except UserError as error:
            verdict.unexplained.append({"id": case["id"], "error": str(error)})
    return verdict


def _judge(case: dict[str, Any], results: Mapping[str, Any], library: Library, verdict: Verdict) -> None:
    if "hardware" in case and isinstance(case["hardware"], dict):
        _compare(case["id"], case, offer_line(library, case["model"], case["variant"]), verdict)
        return
    expected = case["result"] if "result" in case else results.get(case.get("same_as", ""))
    if expected is None:
        raise UserError("the case has neither a result nor a same_as that points at one")
    selection = select(library, choice_of(case))
    found = resolve(selection)
    faults = [
        finding.rule for finding in found.findings if finding.kind != "warning" and finding.rule in PUBLISHED_FAULTS
    ]
    corrected_only = not found.of_kind("refusal")
    if not faults or (corrected_only and found.plain() == expected):
        _compare(case["id"], expected, found.plain(), verdict)
        return
    published = resolve(selection, published=True).plain()
    if published != expected:
        _compare(case["id"], expected, published, verdict)
    else:
        verdict.deviate(faults[0], case["id"])


def choice_of(case: dict[str, Any]) -> Choice:
    """Return the choice that a golden case describes."""
    pools = None
    if case.get("pd_nodes") is not None:
        pools = {
            role: PoolChoice(given)
            if isinstance(given, int)
            else PoolChoice(given.get("nodes", 1), given.get("rank", 0), given.get("parallelism"))
            for role, given in case["pd_nodes"].items()
        }
    return Choice(
        model=case["model"],
        variant=case["variant"],
        strategy=case["strategy"],
        hardware=case["hardware"],
        features=tuple(case["features"]),
        modes=case.get("feature_modes") or {},
        nodes=case["nodes"],
        pools=pools,
    )


def _compare(name: str, expected: Any, found: Any, verdict: Verdict) -> None:
    if expected == found:
        verdict.exact += 1
        return
    differences = list(_differences(expected, found, ""))[:10]
    verdict.unexplained.append({"id": name, "differences": differences})


def _differences(expected: Any, found: Any, where: str) -> Iterator[dict[str, Any]]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if expected.get(key) != found.get(key):
                yield from _differences(expected.get(key), found.get(key), f"{where}.{key}" if where else key)
    else:
        yield {"where": where, "expected": expected, "found": found}
