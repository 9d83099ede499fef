"""new_cache: a decode loop in one call; beams, truncation, forks, threads, misuse."""

import os
import threading

import numpy as np
import pytest
from session_helpers import MODEL, options

from ort_webgpu import DeviceMemoryError, DeviceValue, InvalidInputError, WebGPUSession
from ort_webgpu import cache as cache_module
from ort_webgpu.steps import GpuStep

PROMPT = (5, 9, 200, 31, 7)
PASTS = [f"past_key_values.{layer}.{part}" for layer in range(4) for part in ("key", "value")]
PRESENTS = [name.replace("past_key_values", "present") for name in PASTS]


@pytest.fixture(scope="module")
def session():
    return WebGPUSession(MODEL, options(), adapter="llvmpipe")


@pytest.fixture(scope="module")
def reference():
    return WebGPUSession(MODEL, options(), adapter="none")


class NumpyLoop:
    """The loop as one writes it for ORT: presents become pasts, all of them arrays."""

    def __init__(self, session, batch: int = 1):
        self.session = session
        self.pasts = {name: np.zeros((batch, 2, 0, 32), np.float32) for name in PASTS}

    @property
    def length(self) -> int:
        return self.pasts[PASTS[0]].shape[2]

    def run(self, tokens, **kwargs) -> np.ndarray:
        ids = np.array(tokens, np.int64)
        mask = np.ones((len(ids), self.length + ids.shape[1]), np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask, **self.pasts}
        logits, *presents = self.session.run(["logits", *PRESENTS], feeds, **kwargs)
        self.pasts = dict(zip(PASTS, presents, strict=True))
        return logits


class CachedLoop:
    """The same with a cache."""

    def __init__(self, session, batch: int = 1, **kwargs):
        self.session, self.cache = session, session.new_cache(batch, **kwargs)

    def run(self, tokens) -> np.ndarray:
        ids = np.array(tokens, np.int64)
        mask = np.ones((len(ids), self.cache.length + ids.shape[1]), np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask}
        return self.session.run(["logits"], feeds, cache=self.cache)[0]


def greedy(loop, count: int, **kwargs) -> list[int]:
    logits = loop.run([PROMPT], **kwargs)
    tokens = []
    for _ in range(count):
        tokens.append(int(logits[0, -1].argmax()))
        logits = loop.run([[tokens[-1]]], **kwargs)
    return tokens


def close(one, other) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_greedy_loop_in_every_form_gives_the_same_tokens(session, reference):
    count = 256
    expected = greedy(NumpyLoop(reference), count)
    assert greedy(NumpyLoop(session), 40) == expected[:40]
    for loop, kwargs in (
        (NumpyLoop(session), {"device_outputs": ["present*"]}),
        (CachedLoop(session), {}),
        (CachedLoop(session, capacity=300), {}),
    ):
        assert greedy(loop, count, **kwargs) == expected
    assert greedy(CachedLoop(reference), 40) == expected[:40]


def test_step_moves_only_tokens_and_logits(session):
    loop = CachedLoop(session)
    loop.run([PROMPT])
    counters = session._plan.gpu.counters
    moved = []
    for token in range(150):
        before = counters.bytes_up + counters.bytes_down
        loop.run([[token]])
        moved.append(counters.bytes_up + counters.bytes_down - before)
    assert len(set(moved)) == 1 and moved[0] <= 64 << 10


def test_reorder_truncate_and_fork_are_those_of_numpy(session, reference, rng):
    ours, theirs = CachedLoop(session, 3), NumpyLoop(reference, 3)
    forks = []
    prompt = rng.integers(1, 500, (3, 6))
    close(ours.run(prompt), theirs.run(prompt))
    for turn in range(12):
        tokens = rng.integers(1, 500, (3, 1))
        if turn % 3 == 0:
            order = rng.integers(0, 3, 3)
            ours.cache.reorder(order)
            theirs.pasts = {name: value[order] for name, value in theirs.pasts.items()}
        elif turn % 3 == 1:
            length = theirs.length - int(rng.integers(0, 3))
            ours.cache.truncate(length)
            theirs.pasts = {name: value[:, :, :length] for name, value in theirs.pasts.items()}
        else:
            forks.append((ours.cache.fork(), dict(theirs.pasts)))
        close(ours.run(tokens), theirs.run(tokens))
    for cache, pasts in forks:  # forks are as they were, and go on
        for name in PASTS:
            close(cache[name], pasts[name])
        tokens = rng.integers(1, 500, (3, 1))
        ours.cache, theirs.pasts = cache, pasts
        close(ours.run(tokens), theirs.run(tokens))


def test_reorder_can_change_the_batch(session, reference):
    ours, theirs = CachedLoop(session), NumpyLoop(reference)
    close(ours.run([PROMPT]), theirs.run([PROMPT]))
    ours.cache.reorder([0, 0, 0])
    theirs.pasts = {name: value[[0, 0, 0]] for name, value in theirs.pasts.items()}
    close(ours.run([[1], [2], [3]]), theirs.run([[1], [2], [3]]))
    ours.cache.reorder([2])
    assert ours.cache.batch_size == 1
    theirs.pasts = {name: value[[2]] for name, value in theirs.pasts.items()}
    close(ours.run([[4]]), theirs.run([[4]]))


def test_ragged_batch_grows_in_place(session, reference):
    """Prompts of unequal length, padded on the right."""
    ours, theirs = session.new_cache(2), NumpyLoop(reference, 2)
    ids = np.array([PROMPT, (8, 8, 1, 0, 0)], np.int64)
    mask = np.ones((2, 5), np.int64)
    mask[1, 3:] = 0
    places = []
    for _ in range(8):
        feeds = {"input_ids": ids, "attention_mask": mask}
        (logits,) = session.run(["logits"], feeds, cache=ours)
        expected, *presents = reference.run(["logits", *PRESENTS], {**feeds, **theirs.pasts})
        theirs.pasts = dict(zip(PASTS, presents, strict=True))
        close(logits, expected)
        places.append(id(ours._values[PASTS[0]].buffer))
        ids = np.array([[3], [4]], np.int64)
        mask = np.concatenate([mask, [[1], [0]]], 1)
        mask[1, mask[1].argmin()] = 1
    assert len(set(places)) == 1
    for name in PASTS:
        close(ours[name], theirs.pasts[name])


def test_value_taken_from_a_cache_stays_what_it_was(session):
    loop = CachedLoop(session)
    loop.run([PROMPT])
    value = loop.cache[PASTS[3]]
    before = value.numpy()
    loop.cache.truncate(2)
    loop.run([[400, 401]])
    assert value.numpy().tobytes() == before.tobytes()


def test_presents_can_be_had_beside_the_cache(session):
    cache = session.new_cache(1)
    feeds = {
        "input_ids": np.array([PROMPT], np.int64),
        "attention_mask": np.ones((1, 5), np.int64),
    }
    assert len(session.run(None, feeds, cache=cache)) == 1
    cache = session.new_cache(1)
    names = ["present.1.value", "logits", "present.0.key"]
    value, logits, key = session.run(names, feeds, cache=cache, device_outputs=["present.0.key"])
    assert isinstance(key, DeviceValue) and isinstance(value, np.ndarray)
    close(value, cache["past_key_values.1.value"])
    assert logits.shape == (1, 5, 512)


def test_failed_run_leaves_the_cache_valid(session, reference, monkeypatch):
    ours, theirs = CachedLoop(session, 2), NumpyLoop(reference, 2)
    prompt = [PROMPT, PROMPT]
    close(ours.run(prompt), theirs.run(prompt))
    with pytest.raises(InvalidInputError):
        ours.run([[1], [2], [3]])  # a batch of three
    assert ours.cache.length == 5
    with monkeypatch.context() as patched:  # the last layer fails when the first have appended
        last = next(step for step in reversed(session._plan.steps) if isinstance(step, GpuStep))

        def fail(*_):
            raise DeviceMemoryError("made to fail")

        patched.setattr(last, "_operands", fail)
        with pytest.raises(DeviceMemoryError, match="made to fail"):
            ours.run([[9], [9]])
    assert ours.cache.length == 5
    close(ours.run([[1], [2]]), theirs.run([[1], [2]]))
    for name in PASTS:
        close(ours.cache[name], theirs.pasts[name])


def test_capacity_is_a_limit(session, reference):
    for one in (session, reference):
        loop = CachedLoop(one, capacity=6)
        loop.run([PROMPT])
        loop.run([[1]])
        with pytest.raises(InvalidInputError, match=r"room for 6 rows.* 7\. .*larger capacity"):
            loop.run([[2]])
        assert loop.cache.length == 6
        loop.cache.truncate(5)
        loop.run([[2]])


def test_misuse_is_named(session, reference):
    cache = session.new_cache(1)
    feeds = {"input_ids": np.ones((1, 1), np.int64), "attention_mask": np.ones((1, 1), np.int64)}
    with pytest.raises(InvalidInputError, match="made by another session"):
        reference.run(None, feeds, cache=cache)
    with pytest.raises(InvalidInputError, match=r"lie in \[0, 1\)"):
        cache.reorder([1])
    with pytest.raises(InvalidInputError, match="can only get shorter"):
        cache.truncate(1)
    with pytest.raises(InvalidInputError, match="must be positive"):
        session.new_cache(0)
    wrong = reference.new_cache(3)
    with pytest.raises(Exception, match=r"batch"):
        reference.run(None, feeds, cache=wrong)
    assert wrong.length == 0


def test_eight_threads_with_a_cache_each(session, reference):
    count = 100
    prompts = [[(7 * k + 1, 3 * k + 2, k + 5)] for k in range(8)]
    expected = {}
    for k, prompt in enumerate(prompts[:2]):
        expected[k] = _tokens(NumpyLoop(reference), prompt, count)
    found: dict[int, list[int]] = {}
    errors: list[Exception] = []

    def work(k: int) -> None:
        try:
            found[k] = _tokens(CachedLoop(session), prompts[k], count)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for k in range(2, 8):
        expected[k] = _tokens(CachedLoop(session), prompts[k], count)
    assert found == expected


def _tokens(loop, prompt, count: int) -> list[int]:
    logits = loop.run(prompt)
    tokens = []
    for _ in range(count):
        tokens.append(int(logits[0, -1].argmax()))
        logits = loop.run([[tokens[-1]]])
    return tokens


# -- other models ----------------------------------------------------------------------------------


def _io(folder) -> tuple[list[dict], list[dict]]:
    stored = np.load(folder / "io.npz")
    count = 1 + max(int(name.split(".")[0][4:]) for name in stored)
    steps = []
    for part in ("in", "out", "ref"):
        steps.append(
            [
                {
                    name.split(".", 2)[2]: stored[name]
                    for name in stored
                    if name.startswith(f"step{i}.{part}.")
                }
                for i in range(count)
            ]
        )
    return steps[0], [out or ref for out, ref in zip(steps[1], steps[2], strict=True)]


def test_window_cache_model_follows_its_record(shared):
    folder = shared / "models" / "gqa_gemma2_fp32_windowed_cache"
    session = WebGPUSession(folder / "model.onnx", options(), adapter="llvmpipe")
    feeds, expected = _io(folder)
    cache = session.new_cache(2)
    for given, wanted in zip(feeds, expected, strict=True):
        own = {k: v for k, v in given.items() if not k.startswith("past")}
        (logits,) = session.run(["logits"], own, cache=cache)
        close(logits, wanted["logits"])
    for name in cache.names:
        close(cache[name], wanted[name.replace("past_key_values", "present")])
    with pytest.raises(InvalidInputError, match="window cache"):
        cache.truncate(1)


@pytest.mark.parametrize(
    ("folder", "model"),
    [
        ("dmmha_whisper_decoder", "model.onnx"),
        ("dmmha_t5_decoder", "model_rpb_decomposed.onnx"),
    ],
)
def test_encoder_decoder_models_follow_their_records(shared, folder, model):
    """Self caches of fixed size are written in place, cross caches are uploaded once."""
    folder = shared / "models" / folder
    session = WebGPUSession(folder / model, options(), adapter="llvmpipe")
    feeds, expected = _io(folder)
    cache = session.new_cache(2, capacity=24)
    counters = session._plan.gpu.counters
    for i, (given, wanted) in enumerate(zip(feeds, expected, strict=True)):
        before = counters.bytes_up + counters.bytes_down
        (logits,) = session.run(["logits"], {**feeds[0], **given} if i == 0 else given, cache=cache)
        assert i == 0 or counters.bytes_up + counters.bytes_down - before < 64 << 10
        np.testing.assert_allclose(logits, wanted["logits"], rtol=1e-3, atol=1e-3)
    cache.reorder([1, 0])
    cache.reorder([1, 0])
    again = session.run(["logits"], given, cache=cache)[0]
    np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-5)


def _window_steps(shared, count: int) -> tuple[int, int]:
    """Growth of device memory (bytes) and of process memory (KiB) over `count` steps."""
    folder = shared / "models" / "gqa_gemma2_fp32_windowed_cache"
    session = WebGPUSession(folder / "model.onnx", options(), adapter="llvmpipe")
    cache = session.new_cache(1)
    gpu = session._plan.gpu
    growing = [name for name in cache.names if cache._pairs[name].kind == "growing"]
    sizes = []
    for i in range(count):
        length = min(i, 40) + 1
        if cache.length >= 40:  # the other layer's cache keeps to a size, so that only leaks grow
            for name in growing:
                cache._values[name] = cache_module._cut(cache._values[name], 39, False)
            length = 40
        feeds = {
            "input_ids": np.full((1, 1), i % 500, np.int64),
            "attention_mask": np.ones((1, length), np.int64),
        }
        session.run(["logits"], feeds, cache=cache)
        if i in (count // 5, count - 1):
            sizes.append((gpu.counters.allocated_bytes, _resident_kib()))
    return sizes[1][0] - sizes[0][0], sizes[1][1] - sizes[0][1]


def _resident_kib() -> int:
    with open(f"/proc/{os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * 4


def test_long_window_decode_does_not_grow(shared):
    device, process = _window_steps(shared, 500)
    assert device == 0
    assert process < 8 << 10


@pytest.mark.slow
def test_very_long_window_decode_does_not_grow(shared):
    device, process = _window_steps(shared, 10_000)
    assert device == 0
    assert process < 16 << 10
