"""What `ort-webgpu tune` prints: findings as a table. Needs the extra `cli`."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ort_webgpu.ops.tuned import Finding, milliseconds
from ort_webgpu.tuning import Stored

__all__ = ["print_findings", "print_stored"]


def print_stored(stored: Stored, console: Console) -> None:
    """The file, and what is in it or why it is not used."""
    if stored.obstacle:
        console.print(stored.obstacle, highlight=False, soft_wrap=True)
    elif not stored.tuned:
        console.print(
            f"nothing is tuned: {stored.path} is not there. `ort-webgpu tune` measures",
            highlight=False,
            soft_wrap=True,
        )
    else:
        print_findings(stored.tuned.findings, console)
        console.print(f"in {stored.path}", highlight=False, soft_wrap=True)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """A row for each class of calls; a setting is shares of the keys, or a tile."""
    table = Table(
        "rows", "keys", "KV heads", "head size", "cache", "with", "route", "setting", "time",
        "by rule", "gain", "measured",
    )  # fmt: skip
    for finding in findings:
        calls, seconds = finding.calls, finding.times[0][1]
        rule, by_rule = finding.by_rule
        setting = dict(finding.settings).get(finding.route, ())
        table.add_row(
            str(calls.rows),
            str(calls.keys),
            str(calls.heads),
            str(calls.head_size),
            calls.kv_dtype,
            ", ".join(calls.features) or "-",
            finding.route,
            "x".join(map(str, setting)) or "by rule",
            milliseconds(seconds),
            f"{milliseconds(by_rule)} {rule}",
            f"{by_rule / seconds:.2f}x",
            finding.date,
        )
    console.print(table)
