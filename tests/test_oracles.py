"""The corpus and its oracles are right: numpy agrees with ORT's CPU EP wherever ORT can serve."""

import numpy as np
import onnxruntime as ort
import pytest

from ort_webgpu.conformance import corpus_gqa
from ort_webgpu.conformance.cases import (
    OPERATORS,
    Case,
    Expected,
    RejectCase,
    corpus,
    rejections,
)
from ort_webgpu.conformance.checks import (
    MismatchError,
    check_rejected,
    compare_arrays,
    compare_outputs,
)
from ort_webgpu.conformance.covering import pairwise, uncovered
from ort_webgpu.conformance.oracles import (
    numpy_oracle,
    oracle,
    ort_oracle,
    ort_padded_oracle,
    why_not_on_ort,
)
from ort_webgpu.conformance.tolerances import DEFAULT

CASES = corpus()
ON_ORT = [case for case in CASES if why_not_on_ort(case) is None]
PACKED = [case for case in CASES if case.op_type.startswith("Packed")]


REJECTED_BY_ORT = [case for case in rejections() if case.ort == "rejects"]


def ort_session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def outputs_of(expected: Expected) -> list[np.ndarray]:
    """The wanted outputs as a candidate would return them."""
    return [values for values, _ in expected.wanted()]


@pytest.mark.parametrize("case", ON_ORT, ids=str)
def test_numpy_agrees_with_ort(case: Case) -> None:
    compare_outputs(outputs_of(ort_oracle(case)), numpy_oracle(case), case)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_numpy_agrees_with_ort_on_the_padded_form(case: Case) -> None:
    compare_outputs(outputs_of(ort_padded_oracle(case)), numpy_oracle(case), case)


@pytest.mark.parametrize("op_type", OPERATORS)
def test_every_case_has_an_oracle_and_an_own_name(op_type: str) -> None:
    cases = corpus(op_type)
    assert len({case.name for case in cases}) == len(cases) >= 10
    for case in cases:
        expected = oracle(case)
        assert len(expected.wanted()) == len(case.output_names())
        specified = [care is None or care.any() for _, care in expected.wanted()]
        assert specified[0], case.name


def test_ort_serves_most_of_the_corpus() -> None:
    kinds = {op: [c for c in ON_ORT if c.op_type == op] for op in OPERATORS}
    assert len(kinds["GroupQueryAttention"]) >= 180
    assert len(kinds["DecoderMaskedMultiHeadAttention"]) >= 90


def test_ort_oracle_says_what_it_cannot_do() -> None:
    case = next(case for case in corpus("GroupQueryAttention") if "norm" in case.features)
    with pytest.raises(ValueError, match="q_norm_weight"):
        ort_oracle(case)


@pytest.mark.parametrize("part", ["_FLOAT", "_BEYOND_ORT", "_QUANTIZED", "_WINDOW_CACHE"])
@pytest.mark.parametrize("rotation", [0, 1])
def test_every_valid_pair_of_features_meets(part: str, rotation: int) -> None:
    parameters, valid = getattr(corpus_gqa, part), corpus_gqa._valid
    rows = pairwise(parameters, valid, rotation)
    assert all(valid(row) for row in rows)
    missing = uncovered(parameters, valid, rows)
    # A pair that no whole row can hold: three rules together exclude it.
    impossible = {("position_ids", True), ("phase", "prompt_static")}
    assert all(pair & impossible for pair in missing), missing
    assert len(missing) <= 3


def test_corpus_is_deterministic() -> None:
    again = corpus_gqa.generated_gqa_cases("ci")
    first = {case.name: case for case in corpus("GroupQueryAttention")}
    for case in again:
        for left, right in zip(case.inputs, first[case.name].inputs, strict=True):
            assert (left is None) == (right is None)
            assert left is None or np.array_equal(left, right, equal_nan=True)


def test_unknown_level_and_operator_are_named() -> None:
    with pytest.raises(ValueError, match="'nightly'"):
        corpus(level="nightly")
    with pytest.raises(ValueError, match="'MatMul'"):
        corpus("MatMul")


def wrong_element(expected: Expected, index: int) -> list[np.ndarray]:
    """A candidate's outputs with one specified element of output `index` off by a tenth or one."""
    outputs = [values.copy() for values in outputs_of(expected)]
    _, care = expected.wanted()[index]
    spots = np.argwhere(np.ones(outputs[index].shape, bool) if care is None else care)
    spot = tuple(spots[len(spots) // 2])
    old = outputs[index][spot]
    outputs[index][spot] = old ^ 1 if old.dtype.kind in "iu" else old + 1 + abs(old) / 10
    return outputs


@pytest.mark.parametrize("case", CASES[::40], ids=str)
def test_one_wrong_element_is_found(case: Case) -> None:
    expected = numpy_oracle(case)
    for index, name in enumerate(case.output_names()):
        _, care = expected.wanted()[index]
        if care is not None and not care.any():
            continue
        with pytest.raises(MismatchError, match=rf"{name}: 1 of \d+ elements differ"):
            compare_outputs(wrong_element(expected, index), expected, case)


def test_comparison_names_count_shape_dtype_and_nan() -> None:
    case = corpus("RestorePadding")[0]
    expected = numpy_oracle(case)
    (right,) = outputs_of(expected)
    with pytest.raises(MismatchError, match="0 outputs, expected 1"):
        compare_outputs([], expected, case)
    with pytest.raises(MismatchError, match=r"shape .* expected"):
        compare_outputs([right[:, :1]], expected, case)
    with pytest.raises(MismatchError, match="dtype float64, expected float32"):
        compare_outputs([right.astype(np.float64)], expected, case)
    broken = right.copy()
    broken[0, 0, 0] = np.nan
    with pytest.raises(MismatchError, match=r"NaN 1 \(expected 0\)"):
        compare_outputs([broken], expected, case)


def test_comparison_treats_nan_inf_and_unspecified_elements() -> None:
    tolerance = DEFAULT["float32"]
    right = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert compare_arrays(right.copy(), right, tolerance) is None
    flipped = np.array([np.nan, -np.inf, -np.inf, 1.0], np.float32)
    assert "worst at (1,)" in (compare_arrays(flipped, right, tolerance) or "")
    care = np.array([True, False, True, True])
    assert compare_arrays(flipped, right, tolerance, care) is None


def test_integers_must_be_exact() -> None:
    right = np.array([1000000], np.int32)
    assert compare_arrays(right + 1, right, DEFAULT["int32"]) is not None


@pytest.mark.parametrize("case", REJECTED_BY_ORT, ids=str)
def test_ort_refuses_what_the_corpus_says(case: RejectCase) -> None:
    check_rejected(ort_session, case)


@pytest.mark.parametrize("op_type", OPERATORS)
def test_rejections_are_many_and_named(op_type: str) -> None:
    cases = rejections(op_type)
    assert len({case.name for case in cases}) == len(cases) >= 3
    assert all(case.mentions for case in cases)


def test_a_valid_node_is_no_rejection() -> None:
    valid = corpus("GroupQueryAttention")[0]
    fields = {name: getattr(valid, name) for name in ("name", "op_type", "attributes", "inputs")}
    case = RejectCase(**fields, wanted=valid.wanted, kind="input", mentions=("nothing",))
    with pytest.raises(MismatchError, match="ran, expected a refusal"):
        check_rejected(ort_session, case)
