"""Checks of option values, shared by the pure functions and the configs, so that each bound is worded once."""

import math
from collections.abc import Sequence


def require_number(
    name: str,
    value: float,
    *,
    above: float | None = None,
    minimum: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> None:
    """Raise `ValueError` unless `value` is a finite number within the given bounds (`above`/`below` are exclusive)."""
    bounds = [
        text
        for bound, text in (
            (above, f"above {above}"),
            (minimum, f"at least {minimum}"),
            (below, f"below {below}"),
            (maximum, f"at most {maximum}"),
        )
        if bound is not None
    ]
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or (above is not None and not value > above)
        or (minimum is not None and not value >= minimum)
        or (below is not None and not value < below)
        or (maximum is not None and not value <= maximum)
    ):
        wanted = f"a finite number {' and '.join(bounds)}".rstrip()
        raise ValueError(f"`{name}` must be {wanted}, got {value!r}.")


def require_whole(name: str, value: int, *, minimum: int) -> None:
    """Raise `ValueError` unless `value` is a whole number of at least `minimum`."""
    require_number(name, value, minimum=minimum)
    if not isinstance(value, int):
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.")


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")
