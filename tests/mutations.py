"""Bugs seeded into the WGSL templates one at a time, to see whether the corpus finds them.

    python tests/mutations.py [TEMPLATE ...] [--count 40] [--adapter llvmpipe] [--json FILE]
    python tests/mutations.py --again FILE     # the survivors of that run
    python tests/mutations.py [...] --json FILE --resume     # what FILE has is not judged again

A mutant is a template with one small change: a comparison off by one, a sign, a constant, a swapped
sine and cosine, a missing barrier, a dropped statement. Every mutant gets a process of its own, in
which the cases that run a changed kernel are judged by their oracles until one fails, some of them
in the geometry that hardware gets, or in each that a tuned setting can name:

    killed      a case came out wrong, or did not come to an end
    invalid     the WGSL does not compile; nobody could ship it
    unreached   no case of the corpus on this adapter renders the changed line
    survived    all cases that run a changed kernel came out right
    explained   not judged: EXPLAINED says why no case can tell it from the original
"""

import argparse
import itertools
import json
import os
import pickle
import random
import re
import select
import signal
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from running import accepting, call_of, run_route, tuned_to
from test_flash_matrix import CONFIGS as PROMPTS
from test_flash_matrix import growing, stale
from test_flash_software import CASES as LARGE
from test_hardware_geometry import hardware_cases
from test_splitk_matrix import CONFIGS as STEPS
from test_splitk_matrix import unusual_queries

from ort_webgpu.conformance.case import Case, Expected
from ort_webgpu.conformance.cases import corpus
from ort_webgpu.conformance.checks import problems
from ort_webgpu.conformance.oracles import oracle
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.attention_core import AttentionProblem
from ort_webgpu.ops.attention_flash_matrix import FlashMatrix
from ort_webgpu.ops.spec import Caps, Route
from ort_webgpu.wgsl import render as rendering
from ort_webgpu.wgsl.kernel import Kernel

TEMPLATES = Path(rendering.__file__).parent / "templates"
SUFFIX = ".wgsl.j2"
PAIRS = 80  # cases that a mutant has to pass to survive, and all literal and large ones
SECONDS = 120  # after which a case counts as never ending

RULES: dict[str, tuple[str, str]] = {
    "less for less or equal": (r"(?<![<])<=(?!=)", "<"),
    "less or equal for less": (r"(?<= )<(?= )", "<="),
    "greater or equal for greater": (r"(?<= )>(?= )", ">="),
    "greater for greater or equal": (r"(?<![>])>=(?!=)", ">"),
    "unequal for equal": (r"==", "!="),
    "equal for unequal": (r"!=", "=="),
    "minus for plus": (r"(?<= )\+(?= )", "-"),
    "plus for minus": (r"(?<= )-(?= )", "+"),
    "plus for times": (r"(?<= )\*(?= )", "+"),
    "times for divide": (r"(?<= )/(?= )", "*"),
    "divide for modulo": (r"(?<= )%(?= )", "/"),
    "or for and": (r"&&", "||"),
    "and for or": (r"\|\|", "&&"),
    "either for both": (r"(?<=\) )&(?= \()", "|"),
    "max for min": (r"\bmin\(", "max("),
    "min for max": (r"\bmax\(", "min("),
    "sine for cosine": (r"\bcos(?=[\w(\[])", "sin"),
    "cosine for sine": (r"\bsin(?=[\w(\[])", "cos"),
    "one for zero": (r"(?<![\w.])0(?=u?\b)(?!\.|x)", "1"),
    "two for one": (r"(?<![\w.])1(?=u?\b)(?!\.)", "2"),
    "zero for one": (r"(?<![\w.])1(?=u?\b)(?!\.)", "0"),
    "x for y": (r"(?<=\w)\.y\b", ".x"),
    "y for x": (r"(?<=\w)\.x\b", ".y"),
    "no barrier": (r"\b(?:workgroupBarrier|storageBarrier)\(\);", ";"),
    "set for add": (r"\+=", "="),
    "no statement": (r"(?m)(?<=^)\s+[\w\[\]. +*/%]+ [+*/-]?= [^;{]+;", " ;"),
    "true for false": (r"\bfalse\b", "true"),
    "false for true": (r"\btrue\b", "false"),
    "no early return": (r"\breturn;", ";"),
}
"""What is done, and the text that it is done to."""

# Jinja's own text and comments, in which nothing is changed.
_APART = re.compile(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}|//[^\n]*", re.S)

_OTHERS_TILE = (
    "the row that it goes on to write is the next tile's first, which the next workgroup writes"
    " again: wrong only where workgroups run in another order"
)
_PADDING_OF_V = " columns of V beyond its width are never written out"
_PAD_OF_HALVES = "the half behind an odd number of elements pads the last word; nobody reads it"
_PAD_OF_WORD = (
    "behind an odd number of elements it writes the next word, which the binding, whole groups of"
    " 16 bytes, has as padding; nobody reads it"
)
_HIDDEN = "hidden keys have the score LOWEST, whose weight is 0"
_BEHIND = "keys behind the end are hidden, whatever is read for them"
_ONCE = "rows are no more than lanes, so the loop runs once at most"
_COVERED = "shares only get larger, and still cover the span once"
_CLAMPED = "lanes behind the last column clamp to it and write the same values once more"
_NO_COLUMN = "the column behind the last is summed up for nothing: it is not written"
_NO_TOKEN = "tokens that do not exist are not written"
_CHECKED = "each row is checked once more before it is written"
_NOTHING = "such a tile is computed for nothing: row_stats does not count it"
_ONE_SUBGROUP = (
    "lavapipe runs the lanes that exchange as one subgroup; SwiftShader does not, and tells"
)
_NO_ROW = "rows that do not exist may hold anything: ORT leaves them unspecified, so no case looks"
_SAME_AGAIN = "lanes behind the last wrap around and write words of v_out once more, the same ones"
_NO_SHARE = "shares behind the last are loaded, but zeros stand for them in the sum"
_BEHIND_ARRAY = (
    "one group more is put behind the array, where stores are dropped or go to its last element,"
    " padding"
)
_PREPARE = "prepare, which runs after, writes the row anyway"
EXPLAINED: dict[tuple[str, str], str] = {
    (
        "attention_flash",
        "let high = min(visible(b, first / {{ GROUP }}u).y,"
        " visible(b, last [/ -> *] {{ GROUP }}u).y);",
    ): "more tiles are masked, where nothing is hidden",
    (
        "prepare",
        "let token = min(vector, u.vectors [- -> +] 1u) / slots;",
    ): "lanes behind the last vector return before they use it",
    (
        "prepare",
        "let position = [0 -> 1]u;",
    ): "without rotary embedding nothing reads it",
    (
        "attention_splitk_matrix",
        "let has_row = lane [< -> <=] {{ ROWS * LPR }}u;",
    ): "the lane behind the rows does once more what the first lane of the last row does",
    (
        "attention_splitk_matrix",
        "let last_key = max(end, [1 -> 2]u) - 1u;",
    ): _BEHIND,
    (
        "attention_splitk_matrix",
        "let last_key = max(end, 1u) [- -> +] 1u;",
    ): _BEHIND,
    (
        "attention_splitk_matrix",
        "let last_key = max(end, 1u) - [1 -> 0]u;",
    ): _BEHIND,
    (
        "attention_splitk_matrix",
        "var seen = vec4<bool>([false -> true]);",
    ): _HIDDEN,
    (
        "attention_common",
        "if (i32(s0) [>= -> >] valid) { return vec2<u32>(0u, 0u); }",
    ): "such rows see no key, so their tile is only computed for nothing",
    (
        "attention_common",
        "if (i32(s) [>= -> >] seq_at(b, 1u)) { hi = 0; }",
    ): _NO_ROW,
    (
        "attention_common",
        "if (i32(s) >= seq_at(b, 1u)) { hi = [0 -> 1]; }",
    ): _NO_ROW,
    (
        "attention_flash",
        "if (i32(first / {{ GROUP }}u) [>= -> >] seq_at(b, 1u)) { return; }",
    ): _CHECKED,
    (
        "attention_merge",
        "write_out(row, head, at, sum * factor); [workgroupBarrier(); -> ;]",
    ): "there is a next pass only where columns take all lanes; then no lane reads another's sum",
    (
        "attention_serial",
        "for (var i = 0u; i [< -> <=] count; i++) { top = max(top, scores[i]); }",
    ): "the score behind the last is LOWEST or, clamped, the last one again; no maximum changes",
    (
        "cache_copy",
        "if (index [>= -> >] 2u * u.words) { return; }",
    ): _SAME_AGAIN,
    (
        "cache_copy",
        "if (index >= 2u * u.words) { [return; -> ;] }",
    ): _SAME_AGAIN,
    (
        "cache_copy",
        "if (row [>= -> >] new_row && row < new_row + u32(seq[b * 12u + 11u])) { return; }",
    ): _PREPARE,
    (
        "cache_copy",
        "if (row >= new_row && row < new_row + u32(seq[b * 12u + 11u])) { [return; -> ;] }",
    ): _PREPARE,
    (
        "gemm",
        "let token = min(first_token + (lane + {{ n * W }}u) / {{ BK4 }}u, u.tokens [- -> +] 1u);",
    ): _NO_TOKEN,
    (
        "gemm",
        "let token = min(first_token + (lane + {{ n * W }}u) / {{ BK4 }}u, u.tokens - [1 -> 0]u);",
    ): _NO_TOKEN,
    (
        "gemm",
        "if (first_group + cl + {{ n * CL }}u [< -> <=] {{ GROUPS }}u) {",
    ): _BEHIND_ARRAY,
    (
        "gemm",
        "for (var start = 0u; start [< -> <=] u.depth; start += {{ BK }}u) {",
    ): "one more step, of zeros",
    (
        "packed_place",
        "if (g [< -> <=] {{ 2 * N * H4 }}u) {",
    ): "the first group of V either way; only its count differs, and" + _PADDING_OF_V,
    (
        "packed_place",
        "p.count = [min( -> max(]4u, {{ V }}u - 4u * p.group);",
    ): "the count only says what fills the padding, and" + _PADDING_OF_V,
    (
        "packed_place",
        "p.count = min(4u, {{ V }}u [- -> +] 4u * p.group);",
    ): "the count only says what fills the padding, and" + _PADDING_OF_V,
    (
        "packed_place",
        "if (count [> -> >=] 0u) { x.x = {{ name }}_at(at); }",
    ): "a group has at least one element",
    (
        "repack",
        "if (i [>= -> >] u.elements) { return 0.0; }",
    ): _PAD_OF_HALVES,
    (
        "repack",
        "if (2u * pair + [1 -> 0]u < u.elements) { out[2u * pair + 1u] = at(2u * pair + 1u); }",
    ): _PAD_OF_WORD,
    (
        "repack",
        "if (2u * pair + 1u [< -> <=] u.elements) { out[2u * pair + 1u] = at(2u * pair + 1u); }",
    ): _PAD_OF_WORD,
    (
        "rows",
        "if (row [>= -> >] rows) { return 0u; }",
    ): _PAD_OF_HALVES,
    (
        "rows",
        "if (row >= rows) { return [0 -> 1]u; }",
    ): _PAD_OF_HALVES,
    (
        "attention_common",
        "if (i32(s0) >= valid) { return vec2<u32>([0 -> 1]u, 0u); }",
    ): "no loop over keys begins: its end is 0",
    (
        "attention_common",
        "if (i32(s0) >= valid) { return vec2<u32>(0u, [0 -> 1]u); }",
    ): "the one key is hidden from each of the rows",
    (
        "attention_splitk",
        "if (j [< -> <=] end) {",
    ): (
        "the reference may be of one key more, whose weight is 0 here and whose raw score is right"
    ),
    (
        "attention_splitk",
        "let seen = (j < end) [& -> |] (j >= see{{ i }}.x) & (j < see{{ i }}.y);",
    ): _HIDDEN,
    (
        "attention_splitk",
        "let seen = (j < end) & (j >= see{{ i }}.x) [& -> |] (j < see{{ i }}.y);",
    ): _HIDDEN,
    (
        "attention_splitk",
        "if (column + {{ c * VP }}u [< -> <=] {{ V4 }}u) {",
    ): _NO_COLUMN,
    (
        "attention_rows",
        "let share = (span.y [- -> +] span.x + u.splits - 1u) / u.splits;",
    ): _COVERED,
    (
        "attention_rows",
        "let share = (span.y - span.x + u.splits [- -> +] 1u) / u.splits;",
    ): _COVERED,
    (
        "attention_rows",
        "let share = (span.y - span.x + u.splits - [1 -> 0]u) / u.splits;",
    ): _COVERED,
    (
        "attention_rows",
        "let share = (span.y - span.x + u.splits - 1u) [/ -> *] u.splits;",
    ): _COVERED,
    (
        "attention_rowstats",
        "for (var row = lane; row < {{ BM }}u; row [+= -> =] {{ workgroup_size }}u) {",
    ): _ONCE,
    (
        "attention_apply_matrix",
        "for (var i = lane; i < {{ BM }}u; i [+= -> =] {{ W }}u) {",
    ): _ONCE,
    (
        "attention_apply_matrix",
        "for (var i = lane; i [< -> <=] {{ BM * BK // 4 }}u; i += {{ W }}u) {",
    ): "the lane that puts one too many puts the value that belongs there next",
    (
        "attention_apply_matrix",
        'p.{{ "xyzw"[c] }} = select(0.0, weight(scores[at + {{ c }}u], m), start + k + {{ c }}u'
        " >= place.x [&& -> ||] start + k + {{ c }}u < place.y);",
    ): _HIDDEN,
    (
        "attention_apply_matrix",
        'p.{{ "xyzw"[c] }} = select(0.0, weight(scores[at + {{ c }}u], m), start + k + {{ c }}u'
        " >= place.x && start + k + {{ c }}u [< -> <=] place.y);",
    ): _HIDDEN,
    (
        "attention_apply_matrix",
        "let x = v_load(key_row(b, tile.kv_head, min(key, tile.span.y [- -> +] 1u)) * {{ V4 }}u"
        " + min(c, {{ V4 - 1 }}u));",
    ): _BEHIND,
    (
        "attention_apply_matrix",
        "let x = v_load(key_row(b, tile.kv_head, min(key, tile.span.y - [1 -> 0]u)) * {{ V4 }}u"
        " + min(c, {{ V4 - 1 }}u));",
    ): _BEHIND,
    (
        "attention_scores_matrix",
        "if (start [>= -> >] tile.span.y) { return; }",
    ): _NOTHING,
    (
        "attention_scores_matrix",
        "if (start >= tile.span.y) { [return; -> ;] }",
    ): _NOTHING,
    (
        "attention_scores_matrix",
        "let last_key = tile.span.y [- -> +] 1u;",
    ): _BEHIND,
    (
        "attention_scores_matrix",
        "let last_key = tile.span.y - [1 -> 0]u;",
    ): _BEHIND,
    (
        "attention_scores_matrix",
        "for (var i = lane; i < {{ BM }}u; i [+= -> =] {{ W }}u) { places[i] = row_at(tile, i); }",
    ): _ONCE,
    (
        "attention_scores_matrix",
        "l += select(0.0, weight(results[row * {{ RS }}u + c], m), j >= place.x [&& -> ||] j <"
        " place.y);",
    ): _HIDDEN,
    (
        "attention_scores_matrix",
        "l += select(0.0, weight(results[row * {{ RS }}u + c], m), j >= place.x && j [< -> <=]"
        " place.y);",
    ): _HIDDEN,
    (
        "attention_tile",
        "let span = visible_span(b, first / {{ GROUP }}u, last [/ -> *] {{ GROUP }}u);",
    ): "keys that no row of the tile sees are hidden from each",
    (
        "gemm_matrix",
        "for (var start = 0u; start [< -> <=] u.depth; start += {{ BK }}u) {",
    ): "one more step, of zeros",
    (
        "attention_flash",
        "for (var start = span.x; start [< -> <=] span.y; start += {{ BN }}u) {",
    ): "one more tile, of hidden keys",
    (
        "attention_flash",
        "if (start < low || start + {{ BN }}u [> -> >=] high) {",
    ): "one more tile is masked where nothing is hidden",
    (
        "attention_flash",
        "let seen{{ k }} = (j{{ k }} >= see{{ i }}.x) [& -> |] (j{{ k }} < see{{ i }}.y);",
    ): _HIDDEN,
    (
        "attention_flash",
        "let seen{{ k }} = (j{{ k }} >= see{{ i }}.x) & (j{{ k }} [< -> <=] see{{ i }}.y);",
    ): _HIDDEN,
    (
        "attention_flash",
        "if (i32(first / {{ GROUP }}u) >= seq_at(b, 1u)) { [return; -> ;] }",
    ): _CHECKED,
    (
        "attention_splitk",
        "let seen = (j [< -> <=] end) & (j >= see{{ i }}.x) & (j < see{{ i }}.y);",
    ): "the score of the key behind the share is LOWEST here, whose weight is 0",
    (
        "attention_rows",
        "if (j [< -> <=] see{{ i }}.x || j >= see{{ i }}.y) { qk_out[qk_place(b, head{{ i }},"
        " s{{ i }}, j)] = 0.0; }",
    ): "the score of that key is written over the zero afterwards",
    (
        "attention_rowstats",
        "for (var row = lane; row [< -> <=] {{ BM }}u; row += {{ workgroup_size }}u) {",
    ): _OTHERS_TILE,
    (
        "attention_splitk",
        "weights[{{ i * W }}u + lane] = x{{ i }}; [workgroupBarrier(); -> ;]",
    ): _ONE_SUBGROUP,
    (
        "attention_splitk_sg",
        "for (; start + {{ GROUPS * KB }}u [<= -> <] whole_to; start += {{ GROUPS * KB }}u) {",
    ): "the last whole step is taken with masks, to the same end",
    (
        "attention_flash_matrix",
        "if (i32(s_first) [>= -> >] seq_at(b, 1u)) { return; }",
    ): _CHECKED,
    (
        "attention_flash_matrix",
        "if (i32(s_first) >= seq_at(b, 1u)) { [return; -> ;] }",
    ): _CHECKED,
    (
        "attention_flash_matrix",
        "let last_key = max(span.y, [1 -> 0]u) - 1u;",
    ): "where no row sees a key no loop begins, and what was loaded before it is not used",
    (
        "attention_flash_matrix",
        "if (lane == [0 -> 1]u) { scores[{{ FLAGS }}u] = vec4<f32>(0.0); }",
    ): "any one lane may do it",
    (
        "attention_flash_matrix",
        "if (peak [> -> >=] reference + TAU) { scores[{{ FLAGS }}u].x = 1.0; }",
    ): "where a score exceeds its reference by exactly TAU, one more pass comes to the same",
    (
        "attention_flash_matrix",
        "let share = (whole.y - from_key + {{ BN }}u * u.splits - 1u) / ({{ BN }}u [* -> +]"
        " u.splits) * {{ BN }}u;",
    ): _COVERED,
    (
        "attention_flash_matrix",
        "let edge = start [< -> <=] low || start + {{ BN }}u > high;",
    ): "one more tile is masked where nothing is hidden",
    (
        "attention_splitk_sg",
        "if (subgroupAny(top [> -> >=] m + SLACK)) {",
    ): "a reference that is not exceeded by more stays, and the factor is 1",
    (
        "attention_splitk_sg",
        "let reference = select(m, top, top [> -> >=] m + SLACK);",
    ): "where scores exceed it by exactly SLACK the reference may follow: sums do too",
    (
        "attention_splitk_sg",
        "for (; start [< -> <=] end; start += {{ GROUPS * KB }}u) {",
    ): "one more step, of hidden keys",
    (
        "attention_merge",
        "share{{ n }} = part_o[(slot + min({{ from }} + {{ n * PARTS }}u, u.splits [- -> +] 1u)) *"
        " {{ V4 }}u + min(column + {{ c * VP }}u, {{ V4 - 1 }}u)];",
    ): _NO_SHARE,
    (
        "attention_merge",
        "share{{ n }} = part_o[(slot + min({{ from }} + {{ n * PARTS }}u, u.splits - [1 -> 0]u)) *"
        " {{ V4 }}u + min(column + {{ c * VP }}u, {{ V4 - 1 }}u)];",
    ): _NO_SHARE,
    (
        "attention_merge",
        "let state = part_ml[slot + min(i, u.splits [- -> +] 1u)];",
    ): _NO_SHARE,
    (
        "attention_merge",
        "let state = part_ml[slot + min(i, u.splits - [1 -> 0]u)];",
    ): _NO_SHARE,
    (
        "attention_flash_matrix",
        "if (written && part [== -> !=] 0u) { part_ml[slot] = vec2<f32>(reference / LOG2E, l); }",
    ): "the other lanes of the row, one at least, have the same two numbers",
    (
        "attention_merge",
        "sums[i] = select(0.0, state.y, i [< -> <=] u.splits);",
    ): "the share behind the last has the reference LOWEST, whose factor is 0",
    (
        "attention_flash",
        "if (i32(first [/ -> *] {{ GROUP }}u) >= seq_at(b, 1u)) { return; }",
    ): "packed rows come from operators whose groups are of one head",
    (
        "attention_common",
        "return vec2<u32>(u32(max(0, hi - u.window)), u32(max([0 -> 1], hi)));",
    ): _NO_ROW,
    (
        "gemm_matrix",
        "let token = min(first_token + (lane + {{ n * W }}u) / {{ BK4 }}u, u.end [- -> +] 1u);",
    ): _NO_TOKEN,
    (
        "gemm_matrix",
        "let token = min(first_token + (lane + {{ n * W }}u) / {{ BK4 }}u, u.end - [1 -> 0]u);",
    ): _NO_TOKEN,
    (
        "gemm_matrix",
        "x{{ n }} = select(vec2<u32>([0 -> 1]u), x[(token * u.depth + k) >> 2u], k < u.depth);",
    ): "beyond the depth the other operand is zeros as well",
    (
        "gemm_matrix",
        "w{{ n }} = select(vec2<u32>([0 -> 1]u), w[(k * {{ COLUMNS }}u + loaded.column) >> 2u], k"
        " < u.depth);",
    ): "beyond the depth the other operand is zeros as well",
    (
        "gemm_matrix",
        "if (row [< -> <=] {{ ROWS }}u && token < u.end && loaded_group < {{ GROUPS }}u) {",
    ): "lanes of every tile share its rows without a remainder, so none is behind the last",
    (
        "attention_scores_matrix",
        "for (var i = lane; i [< -> <=] {{ BN * BK4 }}u; i += {{ W }}u) {",
    ): _BEHIND_ARRAY,
    (
        "attention_apply_matrix",
        "for (var i = lane; i [< -> <=] {{ BK * BN4 }}u; i += {{ W }}u) {",
    ): _BEHIND_ARRAY,
    (
        "packed_place",
        "p.group = (g [- -> +] {{ 2 * N * H4 }}u) % {{ V4 }}u;",
    ): "a head's groups are taken in another order, and all still are",
}
"""(template, `Mutant.shown`) to why no case can tell it from the original."""


@dataclass(frozen=True)
class Mutant:
    """One change: `rule` at characters `start` to `end` of a template, now `text`.

    `shown` is the line with the change marked, as in "if (i [< -> <=] n) {"; where the template has
    that line more than once, the last line of WGSL before it comes first.
    """

    template: str
    rule: str
    start: int
    end: int
    text: str
    line: int
    shown: str

    def applied(self, original: str) -> str:
        """The changed template."""
        return original[: self.start] + self.text + original[self.end :]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; `by` is the case that killed it."""

    mutant: Mutant
    status: str
    by: str = ""
    cases: int = 0
    seconds: float = 0.0


def mutants(template: str, source: str) -> list[Mutant]:
    """Every mutant of a template, in order of place."""
    blank = _APART.sub(lambda m: re.sub(r"[^\n]", "\0", m[0]), source)
    found = []
    for rule, (pattern, text) in RULES.items():
        for match in re.finditer(pattern, blank):
            if "\0" in match[0]:
                continue
            start = match.end() - len(match[0].lstrip())
            line = source.count("\n", 0, start) + 1
            shown = _marked(source, start, match.end(), text.strip())
            found.append(Mutant(template, rule, match.start(), match.end(), text, line, shown))
    return sorted(found, key=lambda m: (m.start, m.rule))


def _marked(source: str, start: int, end: int, text: str) -> str:
    """`Mutant.shown` of characters `start` to `end` becoming `text`."""
    begin = source.rfind("\n", 0, start) + 1
    stop = source.find("\n", end)
    line = source[begin:stop].strip()
    marked = f"{source[begin:start]}[{source[start:end]} -> {text}]{source[end:stop]}".strip()
    if [other.strip() for other in source.splitlines()].count(line) == 1:
        return marked
    lines = [other.strip() for other in source[:begin].splitlines()]
    told = [other for other in lines if not re.fullmatch(r"\}?|\{%.*%\}", other)]
    return f"{told[-1]} {marked}"


def sample(every: Sequence[Mutant], count: int) -> list[Mutant]:
    """`count` of them, the same at every call, from as many rules and lines as can be."""
    if count >= len(every):
        return list(every)
    rng = random.Random(zlib.crc32(every[0].template.encode()))
    by_rule: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in every:
        by_rule[mutant.rule].append(mutant)
    queues = [rng.sample(group, len(group)) for group in by_rule.values()]
    chosen: list[Mutant] = []
    while len(chosen) < count:
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return sorted(chosen, key=lambda m: (m.start, m.rule))


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pair:
    """A case on a route, and the kernels that this runs on a device of these caps."""

    case: Case
    route: Route
    caps: Caps
    kernels: frozenset[Kernel]


@dataclass(frozen=True)
class _Device:
    """What `accepting` asks of a Gpu."""

    caps: Caps


class Bench:
    """All cases on all routes, by kernel. The device is opened in the children only."""

    def __init__(self, adapter: str, level: str = "ci"):
        self.adapter = adapter
        self.caps: Caps = _forked(lambda _: open_gpu(adapter, "wgpu").caps)[1]
        self.pairs: list[Pair] = []
        for case in corpus(level=level):
            self.pairs += _pairs(case, self.caps)
        hardware = replace(self.caps, software=False)
        large = [pair for case in hardware_cases() for pair in _pairs(case, hardware)]
        large += _pairs_by_setting(self.caps)
        large += [pair for config in LARGE for pair in _pairs(config.case(31), self.caps)]
        self.pairs += large
        self.kernels = list(dict.fromkeys(k for pair in self.pairs for k in pair.kernels))
        # A mutant is judged on the first kernels it changes: let them be of all operators.
        random.Random(0).shuffle(self.kernels)
        self._texts = {k: rendering.render(k, self.caps.dialect) for k in self.kernels}
        # These are small and sit on edges; what a sample does not find they may.
        edges = {"literal", "stale_nan", "large_scores"}
        self._edges = [pair for pair in self.pairs if pair.case.features & edges] + large
        self._edge_kernels = list(dict.fromkeys(k for pair in self._edges for k in pair.kernels))
        self._expected: dict[Case, Expected] = {}

    def judge(self, mutant: Mutant) -> Outcome:
        """Run the mutant in a process of its own: on a sample, then on all literal cases."""
        start = time.perf_counter()
        source = (TEMPLATES / f"{mutant.template}{SUFFIX}").read_text("utf-8")
        reached = 0
        with _replaced(mutant.template, mutant.applied(source)):
            for pairs, kernels, limit in (
                (self.pairs, self.kernels, PAIRS),
                (self._edges, self._edge_kernels, len(self._edges)),
            ):
                try:
                    changed = self._changed(mutant.template, kernels, limit)
                except jinja2.TemplateError as error:
                    return Outcome(mutant, "invalid", str(error))
                chosen = _chosen(pairs, changed)[:limit]
                for pair in chosen:
                    self._right(pair.case)
                kind, by, count = self._verdict(chosen) if chosen else ("survived", "", 0)
                reached += count
                if kind != "survived":
                    break
        seconds = time.perf_counter() - start
        status = kind if reached or kind == "invalid" else "unreached"
        return Outcome(mutant, status, by, reached, seconds)

    def _verdict(self, pairs: Sequence[Pair]) -> tuple[str, str, int]:
        status, answer = _forked(lambda alive: self._first_wrong(pairs, alive))
        if status == "timeout":
            return "killed", "did not end", len(pairs)
        if status == "died":
            return "killed", "ended the process", len(pairs)
        return answer

    def _changed(self, template: str, kernels: Sequence[Kernel], limit: int) -> set[Kernel]:
        """Kernels whose text is another now, up to `limit` of each template."""
        changed = set()
        counts: Counter[str] = Counter()
        for kernel in kernels:
            if template not in _parts(kernel.template) or counts[kernel.template] >= limit:
                continue
            if rendering.render(kernel, self.caps.dialect) != self._texts[kernel]:
                changed.add(kernel)
                counts[kernel.template] += 1
        return changed

    def _right(self, case: Case) -> Expected:
        if case not in self._expected:
            self._expected[case] = oracle(case)
        return self._expected[case]

    def _first_wrong(
        self, pairs: Sequence[Pair], alive: Callable[[], None]
    ) -> tuple[str, str, int]:
        gpu = open_gpu(self.adapter, "wgpu")
        for number, pair in enumerate(pairs, 1):
            alive()
            name = f"{pair.case.name} on {pair.route.name}"
            try:
                actual = run_route(pair.case, gpu, pair.route, caps=pair.caps)
            except BaseException as error:
                if "shader" in str(error).lower() or "wgsl" in str(error).lower():
                    return "invalid", str(error)[:300], number
                return "killed", f"{name}: {type(error).__name__}", number
            if problems(actual, self._right(pair.case), pair.case):
                return "killed", name, number
        return "survived", "", len(pairs)


def _pairs(case: Case, caps: Caps) -> list[Pair]:
    problem = call_of(case).problem
    found = []
    for route in accepting(case, _Device(caps)):  # type: ignore[arg-type]
        launches = route.program(problem, caps).launches
        kernels = frozenset(launch.kernel for launch in launches)
        found.append(Pair(case, route, caps, kernels))
    return found


def _tuned_pairs(
    cases: Sequence[Case], name: str, settings: Callable[[AttentionProblem], Any], caps: Caps
) -> list[Pair]:
    """Cases on a core route in each of its settings, of which its rule picks one."""
    found = []
    for case in cases:
        core = call_of(case).problem.core
        for setting in settings(core):
            pairs = _pairs(case, tuned_to(core, caps, name, setting))
            found += [pair for pair in pairs if pair.route.name == name]
    return found


def _pairs_by_setting(caps: Caps) -> list[Pair]:
    """Prompts on attention_flash_matrix in each of its geometries; steps on attention_splitk_matrix
    with the keys in one share and in seven."""
    prompts = [config.case(11) for config in PROMPTS]
    prompts += [growing(prompts[0]), stale()]
    steps = [*(config.case(21) for config in STEPS), *unusual_queries()]
    return [
        *_tuned_pairs(
            prompts,
            "flash_matrix_emulated",
            lambda core: FlashMatrix(False).settings(core, caps),
            caps,
        ),
        *_tuned_pairs(steps, "splitk_matrix_emulated", lambda core: ((1,), (7,)), caps),
    ]


def _chosen(pairs: Sequence[Pair], changed: set[Kernel]) -> list[Pair]:
    """Pairs that run a changed kernel, one for each kernel first; templates take turns.

    What a mutant changes may be in many kernels that never call it, and in few that do.
    """
    first, rest, seen = [], [], set()
    for pair in pairs:
        hit = pair.kernels & changed
        if hit - seen:
            first.append(pair)
            seen |= hit
        elif hit:
            rest.append(pair)
    rng = random.Random(len(pairs))
    queues: dict[frozenset[str], list[Pair]] = defaultdict(list)
    for pair in [*rng.sample(first, len(first)), *rng.sample(rest, len(rest))]:
        queues[frozenset(kernel.template for kernel in pair.kernels & changed)].append(pair)
    turns = itertools.zip_longest(*queues.values())
    return [pair for turn in turns for pair in turn if pair]


def _parts(template: str) -> frozenset[str]:
    """A template and all that it includes."""
    if template not in _included:
        source = (TEMPLATES / f"{template}{SUFFIX}").read_text("utf-8")
        names = re.findall(r'\{%-?\s*(?:include|import|from|extends)\s+"([^"]+)"', source)
        inner = [_parts(name.removesuffix(SUFFIX)) for name in names]
        _included[template] = frozenset({template}).union(*inner)
    return _included[template]


_included: dict[str, frozenset[str]] = {}


class _replaced:
    """While open, the renderer reads `source` for `template`."""

    def __init__(self, template: str, source: str):
        self._name, self._source = f"{template}{SUFFIX}", source

    def __enter__(self) -> None:
        environment = rendering._environment()
        self._loader = environment.loader
        changed = jinja2.DictLoader({self._name: self._source})
        environment.loader = jinja2.ChoiceLoader([changed, self._loader])
        environment.cache.clear()

    def __exit__(self, *_: object) -> None:
        environment = rendering._environment()
        environment.loader = self._loader
        environment.cache.clear()


def _forked(work: Callable[[Callable[[], None]], Any]) -> tuple[str, Any]:
    """("ok", the result) of `work` in a child; ("timeout", None) or ("died", None).

    The child has SECONDS, and again from each call of the function that `work` is given.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        status = 1

        def alive() -> None:
            os.write(writer, b".")

        try:
            result = pickle.dumps(work(alive))
            with os.fdopen(writer, "wb") as channel:
                channel.write(b"!" + result)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    data, chunk = b"", b" "
    with os.fdopen(reader, "rb", buffering=0) as channel:
        while chunk and (ready := select.select([channel], [], [], SECONDS)[0]):
            chunk = channel.read(1 << 16)
            data += chunk
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not ready:
        return "timeout", None
    _, ended, result = data.partition(b"!")
    return ("ok", pickle.loads(result)) if ended else ("died", None)


# -- running ---------------------------------------------------------------------------------------


def template_names() -> list[str]:
    """All templates."""
    return sorted(path.name.removesuffix(SUFFIX) for path in TEMPLATES.glob(f"*{SUFFIX}"))


def run(
    bench: Bench, template: str, count: int, known: Sequence[Outcome] = ()
) -> Iterator[Outcome]:
    """Judge `count` mutants of a template; invalid and unreached ones are replaced by others.

    Outcomes that are `known` are taken as they are.
    """
    by_shown = {o.mutant.shown: o for o in known if o.mutant.template == template}
    every = mutants(template, (TEMPLATES / f"{template}{SUFFIX}").read_text("utf-8"))
    if not every:
        return
    queue = sample(every, count)
    spare = [mutant for mutant in sample(every, len(every)) if mutant not in queue]
    random.Random(count).shuffle(spare)
    while queue:
        mutant = queue.pop(0)
        if explained(mutant):
            outcome = Outcome(mutant, "explained")
        else:
            outcome = by_shown.get(mutant.shown) or bench.judge(mutant)
        yield outcome
        if outcome.status in ("invalid", "unreached") and spare:
            queue.append(spare.pop())


def run_again(bench: Bench, template: str, shown: Sequence[str]) -> Iterator[Outcome]:
    """Judge the mutants of a template that look like these, explained or not."""
    for mutant in mutants(template, (TEMPLATES / f"{template}{SUFFIX}").read_text("utf-8")):
        if mutant.shown in shown:
            yield bench.judge(mutant)


def explained(mutant: Mutant) -> str | None:
    """Why it cannot be told from the original, None where nobody has said."""
    return EXPLAINED.get((mutant.template, mutant.shown))


def share_killed(outcomes: Sequence[Outcome]) -> float:
    """Of the mutants that run and are not explained; 1.0 where there are none."""
    counted = [o for o in outcomes if o.status in ("killed", "survived")]
    return sum(o.status == "killed" for o in counted) / len(counted) if counted else 1.0


def summary(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """Number of outcomes by status."""
    return Counter(o.status for o in outcomes)


def _read(path: Path) -> list[Outcome]:
    """What --json wrote."""
    found = json.loads(path.read_text())
    return [Outcome(**{**one, "mutant": Mutant(**one["mutant"])}) for one in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("templates", nargs="*")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--adapter", default="llvmpipe")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    survivors: dict[str, list[str]] = defaultdict(list)
    for old in _read(args.again) if args.again else ():
        if old.status == "survived":
            survivors[old.mutant.template].append(old.mutant.shown)
    known = _read(args.json) if args.resume and args.json.exists() else []
    bench = Bench(args.adapter)
    print(f"{len(bench.pairs)} cases on routes, {len(bench.kernels)} kernels", flush=True)
    every: list[Outcome] = []
    for template in args.templates or list(survivors) or template_names():
        outcomes = []
        wanted = survivors[template]
        if wanted:
            judged = run_again(bench, template, wanted)
        else:
            judged = run(bench, template, args.count, known)
        for outcome in judged:
            outcomes.append(outcome)
            if outcome.status == "survived":
                m = outcome.mutant
                print(f"  survived {m.template}:{m.line}: {m.shown}", flush=True)
            if args.json:
                found = [asdict(outcome) for outcome in every + outcomes]
                args.json.write_text(json.dumps(found, indent=1))
        every += outcomes
        counts = ", ".join(f"{n} {s}" for s, n in sorted(summary(outcomes).items()))
        seconds = sum(o.seconds for o in outcomes)
        print(
            f"{template}: {counts}; killed {share_killed(outcomes):.1%} ({seconds:.0f} s)",
            flush=True,
        )
    print(f"all: killed {share_killed(every):.1%} of the mutants that run")
    return 0 if share_killed(every) >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
