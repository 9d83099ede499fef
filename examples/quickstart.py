"""The same text from WebGPUSession and from ORT's CPU EP, with placement and time per token."""

import argparse
import statistics
import sys
from pathlib import Path

import onnxruntime
from decode_loop import HERE, PROMPT, Decoder

from ort_webgpu import WebGPUSession


def per_token(times: list[float]) -> str:
    """The prompt's time apart: it is one run() over many tokens, and the first of the session."""
    if len(times) < 2:
        return f"prompt {times[0] * 1e3:.1f} ms" if times else "nothing decoded"
    return f"prompt {times[0] * 1e3:.1f} ms, then {statistics.median(times[1:]) * 1e3:.2f} ms/token"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model", help="a genai model folder")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--adapter", default="auto", help='"auto", "software", part of a name, ...')
    args = parser.parse_args()
    path = args.model / "model.onnx"

    print("--- attention on WebGPU")
    webgpu = WebGPUSession(path, adapter=args.adapter)
    tokens, times = Decoder(webgpu, args.model).stream(args.prompt, args.tokens)

    print("\n--- all on ORT's CPU EP")
    cpu = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected, cpu_times = Decoder(cpu, args.model).stream(args.prompt, args.tokens)

    print(f"\n{webgpu.explain()}\n")
    print(f"WebGPU  {per_token(times)}")
    print(f"CPU EP  {per_token(cpu_times)}")
    if tokens != expected:
        print(f"the tokens differ:\nWebGPU  {tokens}\nCPU EP  {expected}", file=sys.stderr)
        return 1
    print(f"the same {len(tokens)} tokens from both")
    return 0


if __name__ == "__main__":
    sys.exit(main())
