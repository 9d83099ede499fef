"""The placement report of a session: what runs where, by which route, and why."""

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["NOT_RUN", "AssignedNode", "AssignedSubgraph", "Explanation", "Row"]

NOT_RUN = "not run yet"


@dataclass(frozen=True)
class AssignedNode:
    """A node on the device, with the fields of ORT's OrtEpAssignedNode."""

    domain: str
    name: str
    op_type: str


@dataclass(frozen=True)
class AssignedSubgraph:
    """Nodes on the device, with the fields of ORT's OrtEpAssignedSubgraph."""

    ep_name: str
    nodes: tuple[AssignedNode, ...]

    def get_nodes(self) -> list[AssignedNode]:
        """The nodes, in graph order."""
        return list(self.nodes)


@dataclass(frozen=True)
class Row:
    """One candidate node. `placed` is "webgpu" or "cpu"; `rejected` maps routes to reasons.

    `route` is that of the node's last run, or "not run yet"; None on the CPU. `reason` says why the
    node is where it is, and, where a measurement decided that, why the route is the first.
    """

    node: str
    op_type: str
    placed: str
    route: str | None
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """All candidate nodes of a model, in graph order, those inside of other nodes last."""

    rows: list[Row]
    adapter: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "adapter": self.adapter,
            "notes": list(self.notes),
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        offloaded = sum(row.placed == "webgpu" for row in self.rows)
        lines = [
            f"{offloaded} of {len(self.rows)} attention nodes on"
            f" {self.adapter or 'no adapter'}, all other nodes on the CPU"
        ]
        if not self.rows:
            lines[0] = "0 attention nodes found: the whole model runs on the CPU"
        lines += self.notes
        if self.rows:
            cells: list[tuple[str, ...]] = [("node", "operator", "placed", "route", "why")]
            told = set()
            for row in self.rows:
                cells.append((row.node, row.op_type, row.placed, row.route or "-", row.reason))
                others = [("", "", "", f"not {r}", why) for r, why in row.rejected.items()]
                # Layers of a model are alike: what was said of one is not said again
                if (row.route, *others) not in told:
                    told.add((row.route, *others))
                    cells += others
            lines += _table(cells)
        return "\n".join(lines)


def _table(cells: list[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns under a rule; the last one as wide as it comes."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    lines = [
        "  ".join([c.ljust(w) for c, w in zip(row, widths, strict=False)] + [row[-1]]).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in [*widths, len(cells[0][-1])]))
    return lines
