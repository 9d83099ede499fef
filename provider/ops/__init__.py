"""The operators: OPS maps (domain, op_type) to the contract and the routes of each."""

from ort_webgpu.ops.decoder_masked_mha import DecoderMaskedMultiHeadAttention
from ort_webgpu.ops.group_query_attention import GroupQueryAttention
from ort_webgpu.ops.packed_attention import PackedAttention, PackedMultiHeadAttention
from ort_webgpu.ops.padding import RemovePadding, RestorePadding
from ort_webgpu.ops.spec import OpSpec

__all__ = ["OPS"]

OPS: dict[tuple[str, str], OpSpec] = {
    (spec.domain, spec.op_type): spec
    for spec in (
        DecoderMaskedMultiHeadAttention(),
        GroupQueryAttention(),
        PackedAttention(),
        PackedMultiHeadAttention(),
        RemovePadding(),
        RestorePadding(),
    )
}
