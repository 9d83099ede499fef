"""Differential test of a decoder: every output of WebGPUSession next to ORT's CPU EP, step by step.

Both sessions get the same feeds: a prompt, then single tokens that the CPU session chose, with the
caches that the CPU session returned, so that a difference in one step does not carry to the next.
Exits with 1 where an output is further off than --atol.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from decode_loop import HERE, PROMPT, Decoder

from ort_webgpu import WebGPUSession


def differences(
    session: onnxruntime.InferenceSession, decoder: Decoder, prompt: list[int], steps: int
) -> dict[str, float]:
    """The largest absolute difference of each output over all steps."""
    names = [output.name for output in session.get_outputs()]
    worst = dict.fromkeys(names, 0.0)
    feeds = decoder.first_feeds(prompt)
    for _ in range(steps):
        expected = decoder.session.run(None, feeds)
        for name, ours, theirs in zip(names, session.run(None, feeds), expected, strict=True):
            difference = np.abs(ours.astype(np.float64) - theirs).max()
            worst[name] = max(worst[name], float(difference))
        _, feeds = decoder.next_feeds(feeds, expected)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "model")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--atol", type=float, default=1e-3)
    args = parser.parse_args()
    path = args.folder / "model.onnx"
    cpu = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    decoder = Decoder(cpu, args.folder)
    prompt = decoder.tokenizer.encode(PROMPT).ids
    worst = differences(WebGPUSession(path), decoder, prompt, args.steps)
    for name, difference in worst.items():
        print(f"{name:<20} {difference:.2e}")
    bad = [name for name, difference in worst.items() if not difference <= args.atol]
    print(f"beyond {args.atol}: {', '.join(bad)}" if bad else f"all within {args.atol}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
