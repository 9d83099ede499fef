"""Maps a packed sentence encoder over a data set with Ray Data, one session in each worker.

The worker's code is plain onnxruntime: `worker_process_setup_hook` patches each worker process, for
a patch of the driver does not reach them. Needs `ray[data]` beside what embed_sentences.py needs.
A loop without Ray is `[embed(session, tokenizer, batch) for batch in batches]`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import ray

from ort_webgpu import patch_onnxruntime

EXAMPLES = Path(__file__).resolve().parent
SENTENCES = (
    "write the text to a file",
    "an exception is raised when the key is not found",
    "the function returns an integer",
)


class Encoder:
    """One per worker: Ray makes it there and keeps it, so the model is loaded once."""

    def __init__(self, folder: str):
        sys.path.insert(0, str(EXAMPLES))
        import embed_sentences

        self._embed = embed_sentences.embed
        self._tokenizer = embed_sentences.load_tokenizer(Path(folder) / "vocab.json")
        self._session = onnxruntime.InferenceSession(Path(folder) / "model.onnx")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Adds the embedding of each row's `text`, and the provider that computed it."""
        vectors = self._embed(self._session, self._tokenizer, batch["text"].tolist())
        provider = self._session.get_providers()[0]
        return {**batch, "embedding": vectors, "provider": np.array([provider] * len(vectors))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    # a CPU for each worker, and one for what reads and collects the rows
    ray.init(
        num_cpus=args.workers + 2,
        runtime_env={"worker_process_setup_hook": patch_onnxruntime},
        include_dashboard=False,
    )
    rows = [{"id": i, "text": SENTENCES[i % len(SENTENCES)]} for i in range(args.rows)]
    embedded = ray.data.from_items(rows).map_batches(
        Encoder,
        fn_constructor_args=(str(EXAMPLES / "model_embed"),),
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=args.workers),
    )
    results = sorted(embedded.take_all(), key=lambda row: row["id"])
    print(f"{len(results)} embeddings of {len(results[0]['embedding'])} numbers")
    print("computed by", ", ".join(sorted({row["provider"] for row in results})))
    spread = max(
        float(np.abs(row["embedding"] - results[row["id"] % len(SENTENCES)]["embedding"]).max())
        for row in results
    )
    print(f"equal sentences differ by at most {spread:.1e}")
    ray.shutdown()


if __name__ == "__main__":
    main()
