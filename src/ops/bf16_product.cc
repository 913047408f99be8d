#include "src/ops/bf16_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/skinny_product.h"
#include "src/ops/cpu_dispatch.h"

namespace weft::ops {
namespace {

using kernels::cpu::Bf16KernelTable;
using kernels::cpu::Bf16Panel;
using kernels::cpu::kBf16PanelInputs;
using kernels::cpu::kBf16PanelOutputs;

// Threads divide a product into groups. A group is this many rows of one panel.
// The number is a multiple of the rows of every full tile of multiply_panel.
constexpr int64_t kRowGroup = 24;

std::atomic<bool> is_allowed = false;

bool IsInBf16(const at::Tensor& rows, const at::Tensor& weight,
              int64_t input_stride, int64_t output_stride) {
  if (!AreBf16ProductsAllowed() || !HasCpuKernel(rows) ||
      weight.scalar_type() != at::kBFloat16) {
    return false;
  }
  const bool is_forward = input_stride == 1 && output_stride != 1;
  return !is_forward || rows.size(0) > kernels::cpu::kSkinnyRows;
}

// The product of rounded rows with one weight.
class Product {
 public:
  Product(const Bf16KernelTable& kernels, const at::Tensor& rounded,
          const at::Tensor& b_KN, const at::Tensor& y_MN,
          const MakeTermsOfBlock& make_terms)
      : kernels_(kernels),
        make_terms_(make_terms),
        x_(static_cast<const uint16_t*>(rounded.const_data_ptr())),
        x_stride_(rounded.stride(0)),
        weight_(static_cast<const uint16_t*>(b_KN.const_data_ptr())),
        input_stride_(b_KN.stride(0)),
        output_stride_(b_KN.stride(1)),
        y_(y_MN.mutable_data_ptr<float>()),
        y_stride_(y_MN.stride(0)),
        num_rows_(y_MN.size(0)),
        num_inputs_(b_KN.size(0)),
        num_outputs_(b_KN.size(1)) {}

  // Returns the number of groups of rows, added up over all panels. The groups
  // of a panel are adjacent, so a thread with adjacent groups packs the panel
  // once for all of them.
  [[nodiscard]] int64_t num_groups() const {
    return GroupsOfPanel() * CeilDiv(num_outputs_, kBf16PanelOutputs);
  }

  void Run(int64_t begin, int64_t end) const {
    const auto panel = std::make_unique_for_overwrite<Bf16Panel>();
    const TermsOfBlock terms_of = make_terms_ ? make_terms_() : TermsOfBlock();
    const int64_t num_groups = GroupsOfPanel();
    while (begin < end) {
      const int64_t index = begin / num_groups;
      const int64_t stop = std::min(end, (index + 1) * num_groups);
      const int64_t first = index * num_groups;
      RunPanel(index * kBf16PanelOutputs, (begin - first) * kRowGroup,
               std::min(num_rows_, (stop - first) * kRowGroup), terms_of,
               *panel);
      begin = stop;
    }
  }

 private:
  [[nodiscard]] int64_t GroupsOfPanel() const {
    return CeilDiv(num_rows_, kRowGroup);
  }

  // Computes the panel of outputs that begins at `output`, for the rows [begin,
  // end).
  void RunPanel(int64_t output, int64_t begin, int64_t end,
                const TermsOfBlock& terms_of, Bf16Panel& panel) const {
    const int64_t num_outputs =
        std::min(kBf16PanelOutputs, num_outputs_ - output);
    for (int64_t input = 0; input < num_inputs_; input += kBf16PanelInputs) {
      const int64_t num_inputs =
          std::min(kBf16PanelInputs, num_inputs_ - input);
      kernels_.pack_panel(
          {.weight = weight_ + input * input_stride_ + output * output_stride_,
           .input_stride = input_stride_,
           .output_stride = output_stride_,
           .num_inputs = num_inputs,
           .num_outputs = num_outputs},
          panel.elements);
      const bool is_last = input + num_inputs == num_inputs_;
      Bf16Block block = {
          .row = begin, .output = output, .num_outputs = num_outputs};
      for (; block.row < end; block.row += block.num_rows) {
        block.num_rows = end - block.row;
        MultiplyPanel(
            block, input, num_inputs, panel,
            is_last && terms_of ? terms_of(block) : kernels::cpu::Bf16Terms());
      }
    }
  }

  // Multiplies the block's rows with the packed panel of the inputs from
  // `input` on, and adds the terms `last`.
  void MultiplyPanel(const Bf16Block& block, int64_t input, int64_t num_inputs,
                     const Bf16Panel& panel,
                     const kernels::cpu::Bf16Terms& last) const {
    kernels_.multiply_panel({.x = x_ + block.row * x_stride_ + input,
                             .x_row_stride = x_stride_,
                             .num_rows = block.num_rows,
                             .panel = panel.elements,
                             .num_inputs = num_inputs,
                             .num_outputs = block.num_outputs,
                             .adds = input > 0,
                             .last = last,
                             .y_BO = y_ + block.row * y_stride_ + block.output,
                             .y_stride = y_stride_});
  }

  const Bf16KernelTable& kernels_;
  const MakeTermsOfBlock& make_terms_;
  const uint16_t* x_;
  const int64_t x_stride_;
  const uint16_t* weight_;
  const int64_t input_stride_, output_stride_;
  float* y_;
  const int64_t y_stride_;
  const int64_t num_rows_, num_inputs_, num_outputs_;
};

}  // namespace

bool HasBf16Instructions() { return kernels::cpu::Bf16Kernels() != nullptr; }

const Bf16KernelTable& Bf16Table() {
  const Bf16KernelTable* kernels = kernels::cpu::Bf16Kernels();
  TORCH_CHECK(kernels != nullptr, "this processor lacks AVX512_BF16");
  return *kernels;
}

bool AllowBf16Products(bool allowed) {
  is_allowed = allowed && HasBf16Instructions();
  return is_allowed;
}

bool AreBf16ProductsAllowed() { return is_allowed; }

bool IsBf16Product(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return IsInBf16(a_MK, b_KN, b_KN.stride(0), b_KN.stride(1));
}

bool IsBf16Linear(const at::Tensor& x_MI, const at::Tensor& weight_OI) {
  return IsInBf16(x_MI, weight_OI, weight_OI.stride(1), weight_OI.stride(0));
}

at::Tensor RoundToBf16(const at::Tensor& a_MK) {
  const Bf16KernelTable& kernels = Bf16Table();
  const int64_t inputs = a_MK.size(1);
  at::Tensor rounded = at::empty({a_MK.size(0), inputs + inputs % 2},
                                 a_MK.options().dtype(at::kBFloat16));
  const auto* from = a_MK.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(rounded.mutable_data_ptr());
  at::parallel_for(
      0, a_MK.size(0), RowGrain(inputs), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          kernels.round_row(from + row * a_MK.stride(0),
                            /*scale=*/1, inputs, to + row * rounded.stride(0));
        }
      });
  return rounded;
}

void Bf16Product(const at::Tensor& rounded, const at::Tensor& b_KN,
                 const at::Tensor& y_MN, const MakeTermsOfBlock& make_terms) {
  const Bf16KernelTable& kernels = Bf16Table();
  TORCH_CHECK(b_KN.stride(0) == 1 || b_KN.stride(1) == 1,
              "a weight of bf16 products has adjacent inputs or outputs");
  const int64_t inputs = b_KN.size(0);
  TORCH_CHECK(rounded.size(1) == inputs + inputs % 2, "rounded rows have ",
              rounded.size(1), " elements for a weight of ", inputs, " inputs");
  if (y_MN.numel() == 0) return;
  if (inputs == 0) {
    y_MN.zero_();
    return;
  }
  const Product product(kernels, rounded, b_KN, y_MN, make_terms);
  at::parallel_for(
      0, product.num_groups(), RowGrain(kRowGroup * inputs),
      [&](int64_t begin, int64_t end) { product.Run(begin, end); });
}

}  // namespace weft::ops
