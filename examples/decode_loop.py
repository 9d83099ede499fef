"""Greedy decoding with a key/value cache: the loop that any decoder exported for generation needs.

`python examples/decode_loop.py MODEL_FOLDER --prompt TEXT` for a folder that onnxruntime-genai's
model builder wrote (model.onnx, genai_config.json, tokenizer.json). Nothing here knows about
WebGPU but the class that is constructed: `greedy` takes any onnxruntime.InferenceSession.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

HERE = Path(__file__).parent
PROMPT = 'The "try" statement specifies exception handlers'
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Decoder:
    """A session, its tokenizer, and the facts of its genai_config.json."""

    def __init__(self, session: onnxruntime.InferenceSession, folder: Path):
        config = json.loads((folder / "genai_config.json").read_text())["model"]
        end = config["eos_token_id"]
        self.session = session
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.context_length: int = config["context_length"]
        self.end_tokens = set(end) if isinstance(end, list) else {end}
        self._head_size: int = config["decoder"]["head_size"]
        self._outputs = [output.name for output in session.get_outputs()]

    def first_feeds(self, prompt: Sequence[int]) -> dict[str, np.ndarray]:
        """The prompt, with an empty past of shape [1, key/value heads, 0, head size] per layer."""
        caches = {
            arg.name: np.zeros((1, arg.shape[1], 0, self._head_size), _DTYPES[arg.type])
            for arg in self.session.get_inputs()
            if arg.name.startswith("past_key_values.")
        }
        mask = np.ones((1, len(prompt)), np.int64)
        return {"input_ids": np.array([prompt], np.int64), "attention_mask": mask, **caches}

    def next_feeds(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[np.ndarray]
    ) -> tuple[int, dict[str, np.ndarray]]:
        """The likeliest token after a run, and the feeds of the next: each present is a past."""
        results = dict(zip(self._outputs, outputs, strict=True))
        token = int(results["logits"][0, -1].argmax())
        following = {
            name: results[name.replace("past_key_values", "present")]
            for name in feeds
            if name.startswith("past_key_values.")
        }
        following["input_ids"] = np.array([[token]], np.int64)
        following["attention_mask"] = np.ones((1, feeds["attention_mask"].shape[1] + 1), np.int64)
        return token, following

    def greedy(self, prompt: Sequence[int], count: int) -> Iterator[tuple[int, float]]:
        """Yields up to `count` tokens, each with the seconds that its run() took.

        The first time is the whole prompt's. Stops at an end token or when the context is full.
        """
        feeds = self.first_feeds(prompt)
        for _ in range(min(count, self.context_length - len(prompt))):
            start = time.perf_counter()
            outputs = self.session.run(None, feeds)
            seconds = time.perf_counter() - start
            token, feeds = self.next_feeds(feeds, outputs)
            if token in self.end_tokens:
                return
            yield token, seconds

    def stream(self, prompt: str, count: int) -> tuple[list[int], list[float]]:
        """Prints prompt and continuation as they come; returns the tokens and their seconds."""
        print(prompt, end="", flush=True)
        text = DecodeStream(skip_special_tokens=True)
        tokens, times = [], []
        for token, seconds in self.greedy(self.tokenizer.encode(prompt).ids, count):
            tokens.append(token)
            times.append(seconds)
            print(text.step(self.tokenizer, token) or "", end="", flush=True)
        print()
        return tokens, times


def main() -> None:
    from ort_webgpu import WebGPUSession

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()
    session = WebGPUSession(args.folder / "model.onnx")
    Decoder(session, args.folder).stream(args.prompt, args.tokens)


if __name__ == "__main__":
    main()
