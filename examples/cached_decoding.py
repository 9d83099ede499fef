"""Greedy decoding four ways, and the bytes that each moves to and from the device per token.

The same tokens come from numpy arrays, from `device_outputs`, from I/O binding and from
`new_cache`; only the first moves the whole key/value cache at each step. `new_cache` is the
shortest to write.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from decode_loop import HERE, PROMPT, Decoder

from ort_webgpu import WebGPUSession

Step = Callable[[dict[str, np.ndarray]], np.ndarray]


def with_arrays(decoder: Decoder, device: bool) -> Step:
    """Presents come back, as arrays or as DeviceValues, and are fed as pasts."""
    pasts = past_names(decoder)
    caches = {n: v for n, v in decoder.first_feeds([0]).items() if n in pasts}
    patterns = ["present*"] if device else ()

    def step(feeds: dict[str, np.ndarray]) -> np.ndarray:
        names = ["logits", *pasts.values()]
        results = decoder.session.run(names, {**feeds, **caches}, device_outputs=patterns)
        caches.update(zip(pasts, results[1:], strict=True))
        return results[0]

    return step


def with_binding(decoder: Decoder) -> Step:
    """Presents are bound to the device, and what comes of it is bound as pasts."""
    pasts = past_names(decoder)
    binding = decoder.session.io_binding()
    for name, value in decoder.first_feeds([0]).items():
        if name in pasts:
            binding.bind_cpu_input(name, value)

    def step(feeds: dict[str, np.ndarray]) -> np.ndarray:
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name in pasts.values():
            binding.bind_output(name, "webgpu")
        binding.bind_output("logits")
        decoder.session.run_with_iobinding(binding)
        *presents, logits = binding.get_outputs()
        for name, value in zip(pasts, presents, strict=True):
            binding.bind_ortvalue_input(name, value)
        return logits.numpy()

    return step


def with_cache(decoder: Decoder) -> Step:
    """The session finds pasts and presents by itself and keeps them where they are."""
    cache = decoder.session.new_cache(batch_size=1)
    return lambda feeds: decoder.session.run(["logits"], feeds, cache=cache)[0]


def past_names(decoder: Decoder) -> dict[str, str]:
    """Past to present."""
    names = [arg.name for arg in decoder.session.get_inputs()]
    return {
        name: name.replace("past_key_values", "present") for name in names if "past_key" in name
    }


def greedy(step: Step, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest continuation by `count` tokens."""
    ids, tokens = np.array([prompt], np.int64), []
    for seen in range(len(prompt), len(prompt) + count):
        mask = np.ones((1, seen), np.int64)
        logits = step({"input_ids": ids, "attention_mask": mask})
        tokens.append(int(logits[0, -1].argmax()))
        ids = np.array([[tokens[-1]]], np.int64)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()
    decoder = Decoder(WebGPUSession(args.folder / "model.onnx"), args.folder)
    prompt = decoder.tokenizer.encode(args.prompt).ids
    ways = {
        "arrays": with_arrays(decoder, device=False),
        "device_outputs": with_arrays(decoder, device=True),
        "I/O binding": with_binding(decoder),
        "new_cache": with_cache(decoder),
    }
    expected = None
    for name, step in ways.items():
        before, start = decoder.session.bytes_moved(), time.perf_counter()
        tokens = greedy(step, prompt, args.tokens)
        seconds = time.perf_counter() - start
        moved = (decoder.session.bytes_moved() - before) / args.tokens
        expected = expected or tokens
        same = "same tokens" if tokens == expected else "OTHER TOKENS"
        print(f"{name:15} {args.tokens / seconds:7.1f} tokens/s {moved:12,.0f} B/token  {same}")


if __name__ == "__main__":
    main()
