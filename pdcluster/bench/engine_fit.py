"""Measurements of an engine -> the constants of a profile, by least squares of relative errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from pdcluster.errors import UserError
from pdcluster.simulation.profile import EngineProfile, Fit

_SINGULAR = 1e-12
_FEWEST_SHARED = 8  # steps


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Seconds to the first token of a prompt of so many tokens, nothing else running; a median."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Seconds of a step of so many sequences, with so many tokens of context in all (a mean over the steps)."""

    sequences: int
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All points of one engine, and what it says of itself; None where it doesn't."""

    engine: str
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    max_model_len: int | None = None
    block_tokens: int | None = None
    kv_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """One point: seconds that were measured, seconds that the profile says."""

    what: str
    measured: float
    fitted: float

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.fitted / self.measured - 1.0


def shared_steps(times: Sequence[Sequence[float]], tokens: int) -> tuple[float, float] | None:
    """Return the seconds of a step while all sequences decode, and how many tokens all had made by then.

    `times` are when the events of each came, `tokens` how many tokens each made. None where they decode together for
    too few steps. Of each sequence only its own gaps count: events of one step come a little apart.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    seconds = steps = made = 0.0
    for each in times:
        inside = [moment for moment in each if begin <= moment <= end]
        if len(inside) <= _FEWEST_SHARED:
            return None
        # A client that lags is sent several tokens in one event.
        scale = tokens / len(each)
        seconds += inside[-1] - inside[0]
        steps += scale * (len(inside) - 1)
        made += scale * (each.index(inside[0]) + 0.5 * len(inside))
    return seconds / steps, made


def fit_profile(measured: Measured, base: EngineProfile) -> EngineProfile:
    """Return `base` with what was measured in place of its constants, and the error of the fit.

    From `base` come those that no request shows: seats, tokens a step, transfers and leases. Raises `UserError` where
    a sweep has too few points for its constants.
    """
    step_s, token_s, pair_s = _fit_prefill(measured.prefill, base.chunk_tokens)
    base_s, seq_s, context_s = _fit_decode(measured.decode)
    profile = replace(
        base,
        prefill_base_s=step_s,
        prefill_tokens_per_s=1.0 / token_s,
        prefill_pair_s=pair_s,
        decode_base_s=base_s,
        decode_seq_s=seq_s,
        decode_token_s=context_s,
        max_model_len=measured.max_model_len or base.max_model_len,
        block_tokens=measured.block_tokens or base.block_tokens,
        kv_blocks=measured.kv_blocks or base.kv_blocks,
        cache_blocks=None if measured.kv_blocks else base.cache_blocks,
    )
    errors = [abs(forecast.error) for forecast in forecasts(measured, profile)]
    count = len(measured.prefill)
    return replace(
        profile, fit=Fit(measured.engine, fmean(errors[:count]), fmean(errors[count:]), max(errors), len(errors))
    )


def forecasts(measured: Measured, profile: EngineProfile) -> list[Forecast]:
    """Return every point, prefill first, beside what a profile says of it."""
    steps = [
        (f"prefill of {point.tokens} tokens", point.seconds, _prefill_s(profile, point.tokens))
        for point in measured.prefill
    ] + [
        (
            f"step of {point.sequences} at {point.context / point.sequences:.0f} tokens",
            point.seconds,
            profile.decode_s(point.sequences, point.context),
        )
        for point in measured.decode
    ]
    return [Forecast(*step) for step in steps]


def _prefill_s(profile: EngineProfile, tokens: int) -> float:
    return _steps(tokens, profile.chunk_tokens) * profile.prefill_base_s + profile.prefill_s(tokens, 0)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float], needed: int | None = None) -> list[float]:
    """Return coefficients >= 0 that make each row times them closest to its value, relative to that value.

    The columns are few, so that every set of them is tried: constants are times, and a negative one is no answer.
    Column `needed` gets more than 0. All 0 where no set of columns has a solution.
    """
    width = len(rows[0])
    scaled = [[cell / value for cell in row] for row, value in zip(rows, values, strict=True)]
    best: tuple[float, list[float]] | None = None
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            found = _solve(scaled, columns)
            if found is None or min(found) < 0.0 or (needed is not None and needed not in columns):
                continue
            whole = [0.0] * width
            for column, value in zip(columns, found, strict=True):
                whole[column] = value
            error = sum((_product(row, whole) - 1.0) ** 2 for row in scaled)
            # A further column must earn its place: noise makes each of them a little better.
            if best is None or error < 0.98 * best[0]:
                best = (error, whole)
    return best[1] if best is not None else [0.0] * width


def _fit_prefill(points: Sequence[PrefillPoint], chunk: int | None) -> list[float]:
    if len({point.tokens for point in points}) < 2:  # noqa: PLR2004 - a line needs two
        raise UserError(f"prefill was measured at {len(points)} lengths: too few; raise --max-prompt")
    rows = [(float(_steps(p.tokens, chunk)), float(p.tokens), 0.5 * p.tokens * p.tokens) for p in points]
    found = least_squares(rows, [point.seconds for point in points], needed=1)
    if found[1] <= 0.0:
        raise UserError("longer prompts took no longer: the engine's prefill speed cannot be told; raise --max-prompt")
    return found


def _fit_decode(points: Sequence[DecodePoint]) -> list[float]:
    if not points:
        raise UserError("decode was measured at no point; raise --max-batch")
    rows = [(1.0, float(point.sequences), point.context) for point in points]
    return least_squares(rows, [point.seconds for point in points])


def _steps(tokens: int, chunk: int | None) -> int:
    return 1 if chunk is None else -(-tokens // chunk)


def _product(row: Sequence[float], coefficients: Sequence[float]) -> float:
    return sum(cell * value for cell, value in zip(row, coefficients, strict=True))


def _solve(rows: Sequence[Sequence[float]], columns: Sequence[int]) -> list[float] | None:
    """Return what makes these columns sum to 1 in every row as nearly as possible, None where they say the same."""
    # Columns differ by many powers of ten: each is brought to the same size first.
    sizes = [sum(row[column] ** 2 for row in rows) ** 0.5 for column in columns]
    if min(sizes) == 0.0:
        return None
    cells = [[row[column] / size for column, size in zip(columns, sizes, strict=True)] for row in rows]
    width = len(columns)
    matrix = [
        [sum(row[left] * row[right] for row in cells) for right in range(width)] + [sum(row[left] for row in cells)]
        for left in range(width)
    ]
    for index in range(width):
        pivot = max(range(index, width), key=lambda line: abs(matrix[line][index]))
        matrix[index], matrix[pivot] = matrix[pivot], matrix[index]
        if abs(matrix[index][index]) < _SINGULAR:
            return None
        for line in range(width):
            if line != index:
                factor = matrix[line][index] / matrix[index][index]
                matrix[line] = [a - factor * b for a, b in zip(matrix[line], matrix[index], strict=True)]
    return [matrix[index][width] / matrix[index][index] / sizes[index] for index in range(width)]
