#include "src/ops/matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/skinny_product.h"
#include "src/ops/column_product.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/int8_weight.h"
#include "src/ops/small_products.h"
#include "src/ops/thread_team.h"

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
  int64_t num_groups() const {
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
  int64_t GroupsOfPanel() const { return CeilDiv(num_rows_, kRowGroup); }

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

// The number of columns of b that are copied and multiplied at a time. It is a
// multiple of the columns of every kernel's panel.
constexpr int64_t kSliceColumns = 96;

// From this many rows on, copying the columns takes a small part of the time.
constexpr int64_t kLeastBlockRows = 128;

bool HasAdjacentElements(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 || matrix.stride(1) == 1;
}

// Returns whether PanelMatMul takes the operands: they are f32 on a CPU and not
// empty.
bool TakesPanels(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return HasCpuKernel(a_MK) && HasCpuKernel(b_KN) && a_MK.numel() > 0 &&
         b_KN.numel() > 0;
}

// Returns a b + bias_N. An undefined bias adds nothing. Copies b to panels
// (kernels/cpu/panel_product.h), a few columns at a time. On one core this is
// about as fast as MKL, and 5 % slower than oneDNN, which first compiles code
// for each shape (Zen 4, from 128 rows on). The bits of a row do not depend on
// other rows or on the number of threads.
// REQUIRES: TakesPanels(a_MK, b_KN).
// Shapes:  a_MK [M, K], whose rows may be rows of a larger matrix; b_KN [K, N],
//          also a transposed view. Returns [M, N].
// Errors:  throws c10::Error.
// Threads: any.
at::Tensor PanelMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                       const at::Tensor& bias_N) {
  const int64_t rows = a_MK.size(0), columns = b_KN.size(1);
  const at::Tensor b = HasAdjacentElements(b_KN) ? b_KN : b_KN.contiguous();
  at::Tensor y_MN = at::empty({rows, columns}, a_MK.options());
  if (bias_N.defined()) y_MN.copy_(bias_N.expand({rows, columns}));
  const int64_t num_slices = CeilDiv(columns, kSliceColumns);
  // A weight of few columns, such as a router's, has fewer slices than there
  // are threads. So each slice is multiplied with several blocks of rows.
  const int64_t num_threads =
      at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t block_rows = std::max(
      kLeastBlockRows, CeilDiv(rows, CeilDiv(num_threads, num_slices)));
  const int64_t num_blocks = CeilDiv(rows, block_rows);
  at::parallel_for(
      0, num_slices * num_blocks, RowGrain(kSliceColumns * b_KN.size(0)),
      [&](int64_t begin, int64_t end) {
        const c10::InferenceMode no_autograd;
        PanelMultiplier multiplier;
        for (int64_t task = begin; task < end; ++task) {
          const int64_t first = task / num_blocks * kSliceColumns;
          const int64_t count = std::min(kSliceColumns, columns - first);
          const int64_t row = task % num_blocks * block_rows;
          const int64_t num_rows = std::min(block_rows, rows - row);
          multiplier.Multiply(
              y_MN.narrow(0, row, num_rows).narrow(1, first, count),
              a_MK.narrow(0, row, num_rows), b.narrow(1, first, count),
              /*adds=*/bias_N.defined(), /*alpha=*/1);
        }
      });
  return y_MN;
}

// A skinny product of up to kSkinnyRows rows reads a weight of bf16 or 8 bits
// once. Up to this many such products cost less than widening the weight.
constexpr int64_t kMaxNarrowPasses = 4;

// The only operator through which LibTorch exposes oneDNN's dense product. It
// takes x [M, K], weight [N, K] of any strides, a bias, and a function to apply
// to the product, which is "none" here.
using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&,
                                   const std::optional<at::Tensor>&,
                                   std::string_view,
                                   c10::List<std::optional<at::Scalar>>,
                                   std::optional<std::string_view>);

const char* const kOperator = "mkldnn::_linear_pointwise";

at::Tensor OneDnnMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                        const std::optional<at::Tensor>& bias_N) {
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(kOperator, "")
                                 .typed<LinearPointwise>();
  return linear.call(a_MK.contiguous(), b_KN.t(), bias_N, "none",
                     c10::List<std::optional<at::Scalar>>(), std::nullopt);
}

// Returns whether oneDNN is present and worth using. In measurements it was
// faster only on AMD processors. Some builds of LibTorch lack the operator.
bool HasOneDnn() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") &&
         c10::Dispatcher::singleton().findSchema({kOperator, ""}).has_value();
#else
  return false;
#endif
}

bool PrefersOneDnn(const at::Tensor& a_MK) {
  static const bool has_one_dnn = HasOneDnn();
  // oneDNN gains nothing for an empty product.
  return has_one_dnn && HasCpuKernel(a_MK) && a_MK.numel() > 0;
}

// Returns whether skinny products take a and this weight [O, I] or its
// transposed view: a is f32 on a CPU, contiguous, not empty and has few rows,
// and the weight is f32, bf16 or in 8 bits.
bool HasSkinnyRows(const at::Tensor& a_MK, const at::Tensor& weight) {
  const bool is_narrow =
      weight.scalar_type() == at::kBFloat16 || IsInt8(weight);
  const int64_t most =
      kernels::cpu::kSkinnyRows * (is_narrow ? kMaxNarrowPasses : 1);
  return HasCpuKernel(a_MK) && a_MK.numel() > 0 && a_MK.size(0) <= most &&
         a_MK.is_contiguous() &&
         (is_narrow || weight.scalar_type() == at::kFloat);
}

bool IsSkinny(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return (b_KN.stride(0) == 1 || b_KN.size(0) == 1) &&
         HasSkinnyRows(a_MK, b_KN);
}

void RunPasses(kernels::cpu::SkinnyProduct item, const at::Tensor& weight) {
  const int64_t num_rows = item.num_rows;
  for (int64_t row = 0; row < num_rows; row += kernels::cpu::kSkinnyRows) {
    item.num_rows = std::min(kernels::cpu::kSkinnyRows, num_rows - row);
    RunSkinny(item, weight, /*first_row=*/0);
    item.x_BI += item.num_rows * item.x_stride;
    item.y_BO += item.num_rows * item.y_stride;
  }
}

// Returns a W^T + bias_N. `weight` is W [O, I] or its transposed view, and
// `stride` is the distance between rows of W.
at::Tensor SkinnyMatMul(const at::Tensor& a_MK, const at::Tensor& weight,
                        int64_t outputs, int64_t stride,
                        const at::Tensor& bias_N) {
  at::Tensor y_MN = at::empty({a_MK.size(0), outputs}, a_MK.options());
  at::Tensor bias;
  if (bias_N.defined()) bias = bias_N.to(at::kFloat).contiguous();
  const kernels::cpu::SkinnyProduct whole{
      .x_BI = a_MK.const_data_ptr<float>(),
      .x_stride = a_MK.size(1),
      .num_rows = a_MK.size(0),
      .num_inputs = a_MK.size(1),
      .weight_stride = stride,
      .bias_O = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
      .y_BO = y_MN.mutable_data_ptr<float>(),
      .y_stride = outputs};
  const SharedRows rows = RowsOf(weight, outputs, stride);
  ParallelForRows(rows, [&](int64_t begin, int64_t end) {
    kernels::cpu::SkinnyProduct part = whole;
    part.begin = begin * rows.group_rows;
    part.end = std::min(end * rows.group_rows, outputs);
    RunPasses(part, weight);
  });
  return y_MN;
}

// Returns whether the panel kernel reads b itself: both operands are f32 on a
// CPU and not empty, b is stored row by row, and a has so few rows that copying
// b would not pay off.
bool IsRowProduct(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return b_KN.stride(1) == 1 && a_MK.size(0) <= kernels::cpu::kSkinnyRows &&
         TakesPanels(a_MK, b_KN);
}

at::Tensor RowMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                     const at::Tensor& bias_N) {
  const int64_t inputs = b_KN.size(0), outputs = b_KN.size(1);
  at::Tensor y_MN = at::empty({a_MK.size(0), outputs}, a_MK.options());
  const kernels::cpu::PanelProduct whole{
      .left_MK = a_MK.const_data_ptr<float>(),
      .m_stride = a_MK.stride(0),
      .k_stride = a_MK.stride(1),
      .right_KN = b_KN.const_data_ptr<float>(),
      .right_stride = b_KN.stride(0),
      .num_rows = a_MK.size(0),
      .num_terms = inputs,
      .out_MN = y_MN.mutable_data_ptr<float>(),
      .out_stride = outputs};
  ParallelFor(CeilDiv(outputs, kSliceColumns), RowGrain(kSliceColumns * inputs),
              [&](int64_t begin, int64_t end) {
                const int64_t first = begin * kSliceColumns;
                kernels::cpu::PanelProduct part = whole;
                part.right_KN += first;
                part.out_MN += first;
                part.num_columns =
                    std::min(end * kSliceColumns, outputs) - first;
                kernels::cpu::Kernels().panel_product(part);
              });
  if (bias_N.defined()) y_MN.add_(bias_N);
  return y_MN;
}

at::Tensor Bf16MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                      const at::Tensor& bias_N) {
  at::Tensor y_MN = at::empty({a_MK.size(0), b_KN.size(1)}, a_MK.options());
  Bf16Product(RoundToBf16(a_MK), b_KN, y_MN);
  if (bias_N.defined()) y_MN.add_(bias_N);
  return y_MN;
}

// Returns a b + bias_N. Widens b to the dtype of a, one part at a time.
at::Tensor WidenedMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                         const at::Tensor& bias_N, RowCount row_count) {
  const int64_t inputs = std::max<int64_t>(1, b_KN.size(0));
  return MatMulByColumns(
      a_MK, b_KN.size(1), std::max<int64_t>(1, kWidenedElements / inputs),
      bias_N, row_count, [&](int64_t begin, int64_t end) {
        return b_KN.narrow(1, begin, end - begin).to(a_MK.scalar_type());
      });
}

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

void RunSkinny(const kernels::cpu::SkinnyProduct& item,
               const at::Tensor& weight, int64_t first_row) {
  const int64_t first = first_row * item.weight_stride;
  const kernels::cpu::KernelTable& kernels = kernels::cpu::Kernels();
  if (weight.scalar_type() == at::kFloat) {
    kernels.skinny_product_f32(item, weight.const_data_ptr<float>() + first);
  } else if (IsInt8(weight)) {
    kernels.skinny_product_int8(item, weight.const_data_ptr<int8_t>() + first);
  } else {
    TORCH_CHECK(weight.scalar_type() == at::kBFloat16,
                "a weight of few rows is ", weight.scalar_type());
    kernels.skinny_product_bf16(
        item, static_cast<const uint16_t*>(weight.const_data_ptr()) + first);
  }
}

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return MatMul(a_MK, b_KN, at::Tensor());
}

at::Tensor Linear(const at::Tensor& x_MI, const at::Tensor& weight_OI,
                  const at::Tensor& bias_O, RowCount row_count) {
  // For few rows, does not make the transposed view of the weight, because that
  // would take a noticeable part of a decode step.
  if (x_MI.size(0) <= kernels::cpu::kSkinnyRows && weight_OI.size(1) > 1 &&
      weight_OI.stride(1) == 1 && HasSkinnyRows(x_MI, weight_OI)) {
    return SkinnyMatMul(x_MI, weight_OI, weight_OI.size(0), weight_OI.stride(0),
                        bias_O);
  }
  return MatMul(x_MI, weight_OI.t(), bias_O, row_count);
}

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                  const at::Tensor& bias_N, RowCount row_count) {
  if (IsBf16Product(a_MK, b_KN)) return Bf16MatMul(a_MK, b_KN, bias_N);
  if (IsSkinny(a_MK, b_KN)) {
    return SkinnyMatMul(a_MK, b_KN, b_KN.size(1), b_KN.stride(1), bias_N);
  }
  if (IsInt8(b_KN)) {
    return MatMulOfInt8(a_MK, b_KN, bias_N, row_count);
  }
  if (b_KN.scalar_type() != a_MK.scalar_type()) {
    return WidenedMatMul(a_MK, b_KN, bias_N, row_count);
  }
  if (IsRowProduct(a_MK, b_KN)) return RowMatMul(a_MK, b_KN, bias_N);
  if (row_count == RowCount::kVaries && TakesPanels(a_MK, b_KN)) {
    return PanelMatMul(a_MK, b_KN, bias_N);
  }
  if (!PrefersOneDnn(a_MK)) {
    return bias_N.defined() ? at::addmm(bias_N, a_MK, b_KN)
                            : at::mm(a_MK, b_KN);
  }
  return OneDnnMatMul(
      a_MK, b_KN,
      bias_N.defined() ? std::optional<at::Tensor>(bias_N) : std::nullopt);
}

void MatMulInto(const at::Tensor& a_MK, const at::Tensor& b_KN,
                at::Tensor y_MN) {
  if (IsBf16Product(a_MK, b_KN)) {
    Bf16Product(RoundToBf16(a_MK), b_KN, y_MN);
  } else {
    y_MN.copy_(MatMul(a_MK, b_KN));
  }
}

}  // namespace weft::ops
