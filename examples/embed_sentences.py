"""Embeds sentences with a packed encoder and prints how alike they are, and what ran where.

The model is a sentence-transformers encoder that ONNX Runtime's tools have packed: RemovePadding,
PackedAttention, RestorePadding. ORT has no CPU kernels for these, so plain onnxruntime cannot load
it; `--adapter none` runs it on the CPU all the same, by standard operators.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from ort_webgpu import WebGPUSession

FOLDER = Path(__file__).parent / "model_embed"
SENTENCES = (
    "write the text to a file",
    "read the contents of a document",
    "an exception is raised when the key is not found",
    "a missing key causes an error",
    "the function returns an integer",
    "calling this method gives a number",
)


def load_tokenizer(vocabulary: Path) -> Tokenizer:
    """BERT's tokenizer over the word pieces of `vocabulary`; batches are padded on the right."""
    pieces = json.loads(vocabulary.read_text("utf-8"))
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", pieces["[SEP]"]), ("[CLS]", pieces["[CLS]"])
    )
    tokenizer.enable_padding(pad_id=pieces["[PAD]"], pad_token="[PAD]")
    return tokenizer


def embed(
    session: onnxruntime.InferenceSession, tokenizer: Tokenizer, sentences: Sequence[str]
) -> np.ndarray:
    """Unit vectors, float32 [sentences, hidden]: the mean over each sentence's own tokens.

    Raises ValueError for a sentence with words that the vocabulary lacks.
    """
    encoded = tokenizer.encode_batch(list(sentences))
    for sentence, tokens in zip(sentences, encoded, strict=True):
        unknown = [sentence[slice(*tokens.offsets[i])] for i in _places(tokens.tokens, "[UNK]")]
        if unknown:
            raise ValueError(f"{sentence!r}: the cut vocabulary lacks {', '.join(unknown)}")
    feeds = {
        "input_ids": np.array([tokens.ids for tokens in encoded], np.int64),
        "attention_mask": np.array([tokens.attention_mask for tokens in encoded], np.int64),
        "token_type_ids": np.array([tokens.type_ids for tokens in encoded], np.int64),
    }
    (hidden,) = session.run(["last_hidden_state"], feeds)
    mask = feeds["attention_mask"][:, :, None].astype(np.float32)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def _places(tokens: Sequence[str], wanted: str) -> list[int]:
    return [place for place, token in enumerate(tokens) if token == wanted]


def print_similarities(sentences: Sequence[str], vectors: np.ndarray) -> None:
    """Cosine similarity of each sentence to each other."""
    width = max(map(len, sentences)) + 4
    print(" " * width + "".join(f"{f'[{i}]':>7}" for i in range(len(sentences))))
    for i, (sentence, row) in enumerate(zip(sentences, vectors @ vectors.T, strict=True)):
        print(f"{f'[{i}] {sentence}':<{width}}" + "".join(f"{cosine:7.3f}" for cosine in row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    parser.add_argument("--adapter", default="auto", help='"auto", "none", part of a name, ...')
    args = parser.parse_args()
    session = WebGPUSession(FOLDER / "model.onnx", adapter=args.adapter)
    tokenizer = load_tokenizer(FOLDER / "vocab.json")
    try:
        vectors = embed(session, tokenizer, args.sentences)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print_similarities(args.sentences, vectors)
    print(f"\n{session.explain()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
