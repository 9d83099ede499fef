"""One self-contained HTML page: verdict, tables, plots as inline SVG. Needs the extra `report`."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from ort_webgpu.conformance.compare import Comparison
from ort_webgpu.conformance.difference import BINS
from ort_webgpu.errors import OrtWebGpuError

__all__ = ["html_page", "write_html"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<title>{{ c.model }}: {{ "passed" if c.passed else "FAILED" }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #ddd }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #a00 } .good { color: #070 } svg { max-width: 100%; height: auto }
</style></head><body>
<h1 class="{{ "good" if c.passed else "bad" }}">{{ "Passed" if c.passed else "Failed" }}</h1>
<p>{{ c.model }}<br>{{ c.candidate }} against {{ c.reference }}
{% if c.placement.adapter %}<br>on {{ c.placement.adapter }}{% endif %}</p>
{% if c.first_bad_node %}<p class="bad">First bad node: {{ c.first_bad_node.node }}
(step {{ c.first_bad_node.step }}): {{ c.first_bad_node.problem }}</p>{% endif %}
{% for title, svg in plots %}<h2>{{ title }}</h2>{{ svg }}{% endfor %}
<h2>Outputs</h2>
<table><tr><th>step<th>output<th>shape<th>max abs<th>at<th>mean<th>p99<th>max rel<th>cosine<th></tr>
{% for step in c.steps %}{% for o in step.outputs %}
<tr><td>{{ step.iteration }}.{{ step.step }}<td>{{ o.name }}<td>{{ o.expected[1] | list }}
{% if o.absolute %}<td class="n">{{ "%.2e" | format(o.absolute.max) }}
<td>{{ o.absolute.index | join(", ") }}<td class="n">{{ "%.1e" | format(o.absolute.mean) }}
<td class="n">{{ "%.1e" | format(o.absolute.p99) }}
<td class="n">{{ "%.1e" | format(o.relative.max) }}
<td class="n">{{ "%.7f" | format(o.cosine) if o.cosine is not none else "-" }}
{% else %}<td><td><td><td><td><td>{% endif %}
<td class="{{ "good" if o.passed else "bad" }}">{{ o.problem or "ok" }}</tr>
{% endfor %}{% endfor %}</table>
{% if c.nodes %}<h2>Nodes, each on its own inputs</h2>
<table><tr><th>node<th>step<th>route<th>oracle<th>max abs<th></tr>
{% for n in c.nodes %}<tr><td>{{ n.node }}<td>{{ n.step }}<td>{{ n.route or "cpu" }}
<td>{{ n.oracle }}<td class="n">{{ "%.2e" | format(n.worst) }}
<td class="{{ "good" if n.passed else "bad" }}">{{ n.problem or "ok" }}</tr>
{% endfor %}</table>{% endif %}
{% if c.placement.rows %}<h2>Placement</h2>
<table><tr><th>node<th>operator<th>placed<th>route<th>why</tr>
{% for r in c.placement.rows %}<tr><td>{{ r.node }}<td>{{ r.op_type }}<td>{{ r.placed }}
<td>{{ r.route or "-" }}<td>{{ r.reason }}</tr>{% endfor %}</table>{% endif %}
</body></html>
"""


def write_html(path: Path, comparison: Comparison) -> None:
    """Write the page. Raises OrtWebGpuError where matplotlib is missing."""
    path.write_text(html_page(comparison), encoding="utf-8")


def html_page(comparison: Comparison) -> str:
    """The page's text; it refers to nothing outside itself."""
    try:
        import matplotlib.figure  # noqa: F401 (the plots need it; fail before anything is drawn)
    except ImportError as missing:
        raise OrtWebGpuError(
            "HTML reports need matplotlib: pip install 'ort-webgpu[report]'"
        ) from missing
    plots = [("Error histogram", _histogram(comparison))]
    if comparison.nodes:
        plots.insert(0, ("Difference along the depth", _depth(comparison)))
    if comparison.placement.get("rows"):
        plots.append(("Where nodes run", _placement(comparison.placement["rows"])))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    safe = [(title, Markup(svg)) for title, svg in plots]
    return environment.from_string(_PAGE).render(c=comparison, plots=safe)


def _axes(height: float, title: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(title)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _depth(comparison: Comparison) -> str:
    """The largest error of each offloaded node, in graph order, one line for each step."""
    figure, axes = _axes(3.2, "offloaded node, in the order they ran", "max abs difference")
    steps = sorted({node.step for node in comparison.nodes})
    for step in steps:
        calls = [node for node in comparison.nodes if node.step == step]
        worst = [max(min(node.worst, 1e12), 1e-12) for node in calls]
        axes.plot(range(len(calls)), worst, marker="o", markersize=4, label=f"step {step}")
        bad = [i for i, node in enumerate(calls) if not node.passed]
        axes.plot(bad, [worst[i] for i in bad], "x", color="#a00", markersize=9)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if 1 < len(steps) <= 8:
        axes.legend(frameon=False)
    return _svg(figure)


def _histogram(comparison: Comparison) -> str:
    """How many elements of all outputs are how far off."""
    counts = np.zeros(len(BINS), np.int64)
    for step in comparison.steps:
        for output in step.outputs:
            if output.histogram:
                counts += np.asarray(output.histogram)
    figure, axes = _axes(3.0, "absolute difference, at least", "elements")
    axes.bar([f"{edge:.0e}" if edge else "0" for edge in BINS], counts)
    axes.set_yscale("symlog")
    axes.tick_params(axis="x", labelsize=8)
    return _svg(figure)


def _placement(rows: Sequence[dict[str, Any]]) -> str:
    """A bar for each operator, in parts by place and route."""
    operators = list(dict.fromkeys(row["op_type"] for row in rows))
    places = list(dict.fromkeys(_place(row) for row in rows))
    figure, axes = _axes(1.0 + 0.5 * len(operators), "nodes", "")
    left = np.zeros(len(operators))
    for place in places:
        counts = np.array(
            [sum(r["op_type"] == op and _place(r) == place for r in rows) for op in operators]
        )
        axes.barh(operators, counts, left=left, label=place)
        left += counts
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, ncols=max(1, len(places)), loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(figure)


def _place(row: dict[str, Any]) -> str:
    return row["placed"] + (f", {row['route']}" if row["route"] else "")


def _svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    # Paths instead of fonts, and no date, so that the page is the same everywhere.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ort-webgpu"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("?>")[2].partition('.dtd">')[2]
