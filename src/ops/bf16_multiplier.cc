#include "src/ops/bf16_multiplier.h"

#include <algorithm>

#include "kernels/cpu/bf16_product.h"

namespace weft::ops {
namespace {

using kernels::cpu::Bf16KernelTable;
using kernels::cpu::Bf16PanelProduct;
using kernels::cpu::Bf16PanelSource;
using kernels::cpu::kBf16PanelInputs;
using kernels::cpu::kBf16PanelOutputs;

}  // namespace

Bf16Multiplier::Rounded Bf16Multiplier::Round(const Bf16KernelTable& kernels,
                                              const at::Tensor& x, float scale,
                                              std::vector<uint16_t>& buffer) {
  const bool is_transposed = x.stride(1) != 1;
  const int64_t rows = x.size(is_transposed ? 1 : 0);
  const int64_t columns = x.size(is_transposed ? 0 : 1);
  const int64_t from_stride = x.stride(is_transposed ? 1 : 0);
  const int64_t stride = columns + columns % 2;
  if (std::ssize(buffer) < rows * stride) buffer.resize(rows * stride);
  const auto* from = x.const_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    kernels.round_row(from + row * from_stride, scale, columns,
                      buffer.data() + row * stride);
  }
  return {.data = buffer.data(),
          .row_stride = is_transposed ? 1 : stride,
          .column_stride = is_transposed ? stride : 1};
}

void Bf16Multiplier::Multiply(const at::Tensor& out, const at::Tensor& a,
                              const at::Tensor& b, bool adds, double alpha) {
  const Bf16KernelTable* kernels = kernels::cpu::Bf16Kernels();
  TORCH_CHECK(kernels != nullptr, "this processor lacks AVX512_BF16");
  const Rounded x = Round(*kernels, a, static_cast<float>(alpha), a_);
  const Rounded w = Round(*kernels, b, 1, b_);
  const int64_t num_inputs = a.size(1), num_outputs = out.size(1);
  for (int64_t input = 0; input < num_inputs; input += kBf16PanelInputs) {
    for (int64_t output = 0; output < num_outputs;
         output += kBf16PanelOutputs) {
      const Bf16PanelSource source = {
          .weight = w.At(input, output),
          .input_stride = w.row_stride,
          .output_stride = w.column_stride,
          .num_inputs = std::min(kBf16PanelInputs, num_inputs - input),
          .num_outputs = std::min(kBf16PanelOutputs, num_outputs - output)};
      kernels->pack_panel(source, panel_->elements);
      MultiplyRows(*kernels, x, input,
                   {.num_rows = out.size(0),
                    .panel = panel_->elements,
                    .num_inputs = source.num_inputs,
                    .num_outputs = source.num_outputs,
                    .adds = adds || input > 0,
                    .y_BO = out.mutable_data_ptr<float>() + output,
                    .y_stride = out.stride(0)});
    }
  }
}

void Bf16Multiplier::MultiplyRows(const Bf16KernelTable& kernels,
                                  const Rounded& x, int64_t input,
                                  Bf16PanelProduct all) {
  if (x.column_stride == 1) {
    all.x = x.At(0, input);
    all.x_row_stride = x.row_stride;
    kernels.multiply_panel(all);
    return;
  }
  // The inputs of a row are not adjacent. Packed rows have adjacent pairs.
  for (int64_t row = 0; row < all.num_rows; row += kBf16PanelOutputs) {
    Bf16PanelProduct part = all;
    part.num_rows = std::min(kBf16PanelOutputs, all.num_rows - row);
    part.y_BO += row * all.y_stride;
    kernels.pack_panel({.weight = x.At(row, input),
                        .input_stride = x.column_stride,
                        .output_stride = 1,
                        .num_inputs = all.num_inputs,
                        .num_outputs = part.num_rows},
                       rows_->elements);
    part.x = rows_->elements;
    part.x_row_stride = 2;
    part.x_pair_stride = 2 * kBf16PanelOutputs;
    kernels.multiply_panel(part);
  }
}

}  // namespace weft::ops
