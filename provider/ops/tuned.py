"""What was measured on an adapter, as facts that choices are made by; no device, no files.

A rule chooses routes and settings from caps and shape. `ort-webgpu tune` measures what would do and
leaves a `Finding` for each class of calls; as part of `Caps` these change the order of routes that
accept, and the settings that routes take. A call that is like none of those measured goes by rule.
"""

import math
from dataclasses import dataclass
from functools import cached_property

__all__ = ["CallClass", "Finding", "Tuned", "milliseconds"]

_NEAR = 2  # times, up to which each size of a call may differ from what was measured
_REMEMBERED = 1024  # calls whose finding is not looked for again


@dataclass(frozen=True)
class CallClass:
    """What the time of an attention depends on, whatever the operator.

    `rows` are query rows of one KV head, `keys` those that a row sees at most, `heads` KV heads of
    the whole batch. `features` are what costs time beside these, sorted: "bias", "mask" and so on.
    """

    rows: int
    keys: int
    heads: int
    head_size: int
    v_head_size: int
    kv_dtype: str
    features: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple:
        """What must be equal for a measurement to say anything."""
        return self.head_size, self.v_head_size, self.kv_dtype, self.features

    def distance(self, other: "CallClass") -> float:
        """Doublings between the sizes of two of one kind; infinite where they are too far apart."""
        pairs = ((self.keys, other.keys), (self.rows, other.rows), (self.heads, other.heads))
        if any(a > _NEAR * b or b > _NEAR * a for a, b in pairs):
            return math.inf
        return sum(abs(math.log2(a / b)) for a, b in pairs if a and b)


@dataclass(frozen=True)
class Finding:
    """What one class of calls took: seconds by core route, the preferred one first.

    `settings` are those that a route should take in place of its rule's, as `CoreRoute.settings`
    writes them. `by_rule` is what the rule takes, and its seconds. `date`: ISO 8601, of the day.
    """

    calls: CallClass
    times: tuple[tuple[str, float], ...]
    by_rule: tuple[str, float]
    settings: tuple[tuple[str, tuple[int, ...]], ...] = ()
    date: str = ""

    @property
    def route(self) -> str:
        """The core route to prefer."""
        return self.times[0][0]

    def __str__(self) -> str:
        """Why the preferred route comes first."""
        best, seconds = self.times[0]
        rule, by_rule = self.by_rule
        text = f"tuned: {milliseconds(seconds)}"
        if (best, seconds) != self.by_rule:
            text += f" against {milliseconds(by_rule)} by rule ({rule})"
        elif len(self.times) > 1:
            text += f" against {milliseconds(self.times[1][1])} of {self.times[1][0]}"
        return f"{text}, {self.date}"


@dataclass(frozen=True)
class Tuned:
    """The findings of one adapter, none by default; of two for one call the nearer one holds."""

    findings: tuple[Finding, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.findings)

    def find(self, calls: CallClass) -> Finding | None:
        """What holds for such calls: measured at sizes within a factor of two, or nothing."""
        try:
            return self._known[calls]
        except KeyError:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[calls] = self._nearest(calls)
            return found

    def _nearest(self, calls: CallClass) -> Finding | None:
        nearest, least = None, math.inf
        for finding in self._by_kind.get(calls.kind, ()):
            distance = calls.distance(finding.calls)
            if distance < least:
                nearest, least = finding, distance
        return nearest

    def setting(self, calls: CallClass, route: str) -> tuple[int, ...] | None:
        """The setting to take in place of the rule's, None where the rule holds."""
        finding = self.find(calls)
        return dict(finding.settings).get(route) if finding else None

    @cached_property
    def _known(self) -> dict[CallClass, Finding | None]:
        return {}

    @cached_property
    def _by_kind(self) -> dict[tuple, list[Finding]]:
        found: dict[tuple, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.calls.kind, []).append(finding)
        return found


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds, three digits."""
    return f"{seconds * 1e3:.3g} ms"
