"""Covering arrays: rows in which every pair of parameter values meets at least once."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["pairwise", "uncovered"]


def pairwise(
    parameters: Mapping[str, Sequence[Any]],
    valid: Callable[[Mapping[str, Any]], bool],
    rotation: int = 0,
) -> list[dict[str, Any]]:
    """Rows {parameter: value} that cover every valid pair.

    `valid` is asked about partial rows too and must accept a row whose missing parameters could
    still make it valid. `rotation` turns each value list, which gives a different array of the
    same strength.
    """
    try:
        from allpairspy import AllPairs
    except ImportError as error:
        raise ImportError(
            "generated cases need allpairspy: pip install 'ort-webgpu[test]'"
        ) from error
    names = list(parameters)
    values = []
    for i, name in enumerate(names):
        turn = (rotation * (i + 1)) % len(parameters[name])
        values.append([*parameters[name][turn:], *parameters[name][:turn]])
    pairs = AllPairs(values, filter_func=lambda row: valid(dict(zip(names, row, strict=False))))
    rows = [dict(zip(names, row, strict=True)) for row in pairs]
    # allpairspy stops at the first dead end, which constraints make likely; finish its array.
    domain = dict(zip(names, values, strict=True))
    open_pairs = uncovered(domain, valid, rows)
    used = Counter(item for row in rows for item in row.items())
    while open_pairs:
        pair = min(open_pairs, key=lambda pair: sorted(map(repr, pair)))
        row = _complete(dict(pair), domain, valid, open_pairs, used)
        open_pairs.discard(pair)  # A pair that no full row can hold is dropped.
        if row is not None:
            rows.append(row)
            open_pairs -= _pairs(row)
            used.update(row.items())
    _balance(rows, domain, valid)
    return rows


def _balance(
    rows: list[dict[str, Any]],
    domain: Mapping[str, Sequence[Any]],
    valid: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Give each parameter's values equal shares where no pair is lost by it, in place.

    Pairs that more rows hold than needed otherwise pile up on the last value of each list.
    """
    pairs = Counter(pair for row in rows for pair in _pairs(row))
    used = Counter(item for row in rows for item in row.items())
    for row in rows:
        for name, values in domain.items():
            old = (name, row[name])
            new = (name, min(values, key=lambda value: used[(name, value)]))
            changed = {**row, name: new[1]}
            if used[new] + 1 >= used[old] or not valid(changed):
                continue
            others = [item for item in row.items() if item[0] != name]
            lost = [frozenset({old, item}) for item in others]
            if any(pairs[pair] < 2 for pair in lost):
                continue
            pairs.subtract(lost)
            pairs.update(frozenset({new, item}) for item in others)
            used.subtract([old])
            used.update([new])
            row[name] = new[1]


Pair = frozenset[tuple[str, Any]]


def uncovered(
    parameters: Mapping[str, Sequence[Any]],
    valid: Callable[[Mapping[str, Any]], bool],
    rows: Sequence[Mapping[str, Any]],
) -> set[Pair]:
    """Valid pairs of (parameter, value) that no row holds."""
    covered = set().union(*(_pairs(row) for row in rows))
    return {
        pair
        for one, other in combinations(parameters, 2)
        for x, y in product(parameters[one], parameters[other])
        if (pair := frozenset({(one, x), (other, y)})) not in covered and valid(dict(pair))
    }


def _pairs(row: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def _complete(
    partial: dict[str, Any],
    domain: Mapping[str, Sequence[Any]],
    valid: Callable[[Mapping[str, Any]], bool],
    open_pairs: set[Pair],
    used: Counter[tuple[str, Any]],
) -> dict[str, Any] | None:
    """A full valid row that holds `partial`, greedy for open pairs, then for rare values.

    None if there is no such row.
    """
    name = next((n for n in domain if n not in partial), None)
    if name is None:
        return {n: partial[n] for n in domain}

    def gain(value: Any) -> tuple[int, int]:
        item = (name, value)
        met = sum(frozenset({item, other}) in open_pairs for other in partial.items())
        return met, -used[item]

    for value in sorted(domain[name], key=gain, reverse=True):
        candidate = {**partial, name: value}
        if valid(candidate):
            row = _complete(candidate, domain, valid, open_pairs, used)
            if row is not None:
                return row
    return None
