#include "src/ops/small_products.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"
#include "src/ops/matmul.h"

namespace weft::ops {
namespace {

using kernels::cpu::Bf16KernelTable;
using kernels::cpu::Bf16PanelProduct;
using kernels::cpu::kBf16PanelInputs;
using kernels::cpu::kBf16PanelOutputs;

}  // namespace

void PanelMultiplier::Multiply(const at::Tensor& out, const at::Tensor& a,
                               const at::Tensor& b, bool adds, double alpha) {
  Run(out, a, b, {.scale = static_cast<float>(alpha), .adds = adds});
}

void PanelMultiplier::MultiplyInOrder(const at::Tensor& out,
                                      const at::Tensor& a, const at::Tensor& b,
                                      bool adds) {
  Run(out, a, b, {.adds = adds, .in_order = true});
}

void PanelMultiplier::Run(const at::Tensor& out, const at::Tensor& a,
                          const at::Tensor& b,
                          kernels::cpu::PanelProduct product) {
  namespace k = kernels::cpu;
  const int64_t terms = b.size(0), columns = b.size(1);
  const int64_t floats = k::PanelFloats(terms, columns);
  if (capacity_ < floats) {
    panels_ = std::make_unique_for_overwrite<float[]>(floats);
    capacity_ = floats;
  }
  k::Kernels().copy_panels({.from_KN = b.const_data_ptr<float>(),
                            .k_stride = b.stride(0),
                            .n_stride = b.stride(1),
                            .num_terms = terms,
                            .num_columns = columns,
                            .panels = panels_.get()});
  product.left_MK = a.const_data_ptr<float>();
  product.m_stride = a.stride(0);
  product.k_stride = a.stride(1);
  product.right_KN = panels_.get();
  product.num_rows = a.size(0);
  product.num_terms = terms;
  product.num_columns = columns;
  product.out_MN = out.mutable_data_ptr<float>();
  product.out_stride = out.stride(0);
  k::Kernels().panel_product(product);
}

Bf16Multiplier::Rows Bf16Multiplier::RoundRows(const Bf16KernelTable& kernels,
                                               const at::Tensor& a,
                                               float alpha) {
  const int64_t inputs = a.size(1);
  const Rows x = {.a = a,
                  .alpha = alpha,
                  .is_transposed = a.stride(1) != 1,
                  .rounded_stride = inputs + inputs % 2};
  if (x.is_transposed) return x;
  const int64_t size = a.size(0) * x.rounded_stride;
  if (std::ssize(rounded_) < size) rounded_.resize(size);
  const auto* from = a.const_data_ptr<float>();
  for (int64_t row = 0; row < a.size(0); ++row) {
    kernels.round_row(from + row * a.stride(0), alpha, inputs,
                      rounded_.data() + row * x.rounded_stride);
  }
  return x;
}

void Bf16Multiplier::Multiply(const at::Tensor& out, const at::Tensor& a,
                              const at::Tensor& b, bool adds, double alpha) {
  const Bf16KernelTable& kernels = Bf16Table();
  const Rows x = RoundRows(kernels, a, static_cast<float>(alpha));
  const int64_t num_inputs = a.size(1), num_outputs = out.size(1);
  for (int64_t input = 0; input < num_inputs; input += kBf16PanelInputs) {
    for (int64_t output = 0; output < num_outputs;
         output += kBf16PanelOutputs) {
      const int64_t inputs = std::min(kBf16PanelInputs, num_inputs - input);
      const int64_t outputs = std::min(kBf16PanelOutputs, num_outputs - output);
      kernels.round_panel({.weight = b.const_data_ptr<float>() +
                                     input * b.stride(0) + output * b.stride(1),
                           .input_stride = b.stride(0),
                           .output_stride = b.stride(1),
                           .num_inputs = inputs,
                           .num_outputs = outputs},
                          /*scale=*/1, panel_->elements);
      MultiplyRows(kernels, x, input,
                   {.num_rows = out.size(0),
                    .panel = panel_->elements,
                    .num_inputs = inputs,
                    .num_outputs = outputs,
                    .adds = adds || input > 0,
                    .y_BO = out.mutable_data_ptr<float>() + output,
                    .y_stride = out.stride(0)});
    }
  }
}

void Bf16Multiplier::MultiplyRows(const Bf16KernelTable& kernels, const Rows& x,
                                  int64_t input, Bf16PanelProduct all) {
  if (!x.is_transposed) {
    all.x = rounded_.data() + input;
    all.x_row_stride = x.rounded_stride;
    kernels.multiply_panel(all);
    return;
  }
  // The kernel reads inputs in pairs, and the two inputs of a pair must be
  // adjacent in memory. In a transposed view they are not. So this code packs
  // the rows as a panel, which stores pairs.
  for (int64_t row = 0; row < all.num_rows; row += kBf16PanelOutputs) {
    Bf16PanelProduct part = all;
    part.num_rows = std::min(kBf16PanelOutputs, all.num_rows - row);
    part.y_BO += row * all.y_stride;
    kernels.round_panel(
        {.weight = x.a.const_data_ptr<float>() + input * x.a.stride(1) + row,
         .input_stride = x.a.stride(1),
         .output_stride = 1,
         .num_inputs = all.num_inputs,
         .num_outputs = part.num_rows},
        x.alpha, rows_->elements);
    part.x = rows_->elements;
    part.x_row_stride = 2;
    part.x_pair_stride = 2 * kBf16PanelOutputs;
    kernels.multiply_panel(part);
  }
}

}  // namespace weft::ops
