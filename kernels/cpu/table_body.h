// Makes the table of one instruction set. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_TABLE_BODY_H_
#define WEFT_KERNELS_CPU_TABLE_BODY_H_

#include "kernels/cpu/attention_rows_body.h"
#include "kernels/cpu/delta_mix_body.h"
#include "kernels/cpu/elementwise_body.h"
#include "kernels/cpu/gated_body.h"
#include "kernels/cpu/gated_delta_backward_body.h"
#include "kernels/cpu/gated_delta_body.h"
#include "kernels/cpu/int8_rows_body.h"
#include "kernels/cpu/lse_merge_body.h"
#include "kernels/cpu/paged_attention_body.h"
#include "kernels/cpu/panel_copy_body.h"
#include "kernels/cpu/panel_product_body.h"
#include "kernels/cpu/rms_norm_body.h"
#include "kernels/cpu/row_product_body.h"
#include "kernels/cpu/tables.h"
#include "kernels/cpu/vocab_rows_body.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

constexpr KernelTable MakeTable(Isa isa, const char* name) {
  return {.isa = isa,
          .name = name,
          .rms_norm_row = RmsNormRow,
          .rms_norm_backward_row = RmsNormBackwardRow,
          .rotary_head = RotaryHead,
          .add_row = AddRow,
          .sigmoid_row = SigmoidRow,
          .swiglu_row = GatedRow<Silu>,
          .swiglu_backward_row = GatedBackwardRow<Silu>,
          .geglu_row = GatedRow<GeluTanh>,
          .geglu_backward_row = GatedBackwardRow<GeluTanh>,
          .clamped_swiglu_row = GatedRow<ClampedSilu>,
          .clamped_swiglu_backward_row = GatedBackwardRow<ClampedSilu>,
          .gated_norm_row = GatedNormRow,
          .gated_norm_backward_row = GatedNormBackwardRow,
          .multiply_row = MultiplyRow,
          .delta_mix_row = MixDeltaRow,
          .delta_mix_backward_row = MixDeltaBackwardRow,
          .delta_chunk = RunDeltaChunk,
          .delta_chunk_backward = RunDeltaChunkBackward,
          .delta_step = RunDeltaStep,
          .vocab_row = VocabRow,
          .softcap_row = CapBlock,
          .max_block = MaxBlock,
          .weigh_block = WeighBlock,
          .paged_attention = PagedAttention,
          .softmax_row = SoftmaxRow,
          .softmax_gradient_row = SoftmaxGradientRow,
          .lse_merge_rows = LseMergeRows,
          .row_product_f32 = RunRowProduct<float>,
          .row_product_bf16 = RunRowProduct<uint16_t>,
          .row_product_int8 = RunRowProduct<int8_t>,
          .quantize_row = QuantizeRow,
          .widen_int8_row = WidenInt8Row,
          .widen_bf16_row = WidenBf16Row,
          .panel_product = RunPanelProduct,
          .copy_panels = CopyPanels,
          .adamw = AdamW,
          .sum_of_squares = SumOfSquares,
          .exp = ExpAll};
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_TABLE_BODY_H_
