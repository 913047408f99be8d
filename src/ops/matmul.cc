#include "src/ops/matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/panel_product.h"
#include "kernels/cpu/row_product.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/int8_weight.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

using kernels::cpu::Bf16KernelTable;
using kernels::cpu::Bf16Panel;
using kernels::cpu::kBf16PanelInputs;
using kernels::cpu::kBf16PanelOutputs;
using kernels::cpu::PanelProduct;
using kernels::cpu::RowProduct;

// Threads divide a product into groups. A group is this many rows of one panel.
// The number is a multiple of the rows of every full tile of multiply_panel.
constexpr int64_t kRowGroup = 24;

std::atomic<bool> is_allowed = false;

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

// Returns whether the tensor is a weight, or its transposed view, that the f32
// kernels read.
bool HasKernelWeight(const at::Tensor& weight) {
  return weight.is_cpu() &&
         (weight.scalar_type() == at::kFloat ||
          weight.scalar_type() == at::kBFloat16 || IsInt8(weight));
}

// Returns whether the kernels compute the product in f32.
bool TakesKernels(const at::Tensor& a_MK, const at::Tensor& weight) {
  return HasCpuKernel(a_MK) && HasKernelWeight(weight) && a_MK.numel() > 0;
}

// The kernels take raw pointers, so a wrong size must not reach them.
void CheckSizes(const at::Tensor& a_MK, int64_t terms, const at::Tensor& bias_N,
                int64_t columns) {
  TORCH_CHECK(a_MK.dim() == 2 && a_MK.size(1) == terms, "rows of ",
              a_MK.sizes(), " for a weight of ", terms, " terms");
  TORCH_CHECK(!bias_N.defined() || bias_N.numel() == columns, "a bias of ",
              bias_N.defined() ? bias_N.numel() : 0, " for ", columns,
              " columns");
}

at::Tensor WithAdjacentElements(const at::Tensor& rows) {
  return rows.size(1) < 2 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// The most outputs of a task of a product of many rows. Each task copies its
// rows of x, which costs little beside so many outputs.
constexpr int64_t kTaskOutputs = 192;
// Rows are cut at multiples of this number, which is a multiple of the rows of
// every kernel's tile.
constexpr int64_t kRowUnit = 6;

// Computes `whole` for many rows. A task is a block of rows with some outputs.
void RunManyRows(const RowProduct& whole, const at::Tensor& weight) {
  const int64_t num_units = CeilDiv(whole.num_rows, kRowUnit);
  const int64_t num_blocks =
      CeilDiv(num_units, kernels::cpu::kRowBlock / kRowUnit);
  const int64_t num_slices = CeilDiv(whole.end, kTaskOutputs);
  const auto row_of = [&](int64_t block) {
    return std::min(whole.num_rows, num_units * block / num_blocks * kRowUnit);
  };
  ForEachTask(num_blocks * num_slices, [&](int64_t, int64_t task) {
    const int64_t block = task / num_slices;
    RowProduct part = whole;
    part.x_BI += row_of(block) * part.x_stride;
    part.y_BO += row_of(block) * part.y_stride;
    part.num_rows = row_of(block + 1) - row_of(block);
    part.begin = task % num_slices * kTaskOutputs;
    part.end = std::min(part.begin + kTaskOutputs, whole.end);
    part.memory = ThreadMemory(kernels::cpu::kRowProductFloats);
    RunRowProduct(part, weight, /*first_row=*/0);
  });
}

// Computes y = a W^T + bias_N. `weight` is W [N, K] or its transposed view, and
// `stride` is the distance between rows of W.
void MultiplyByRows(const at::Tensor& a_MK, const at::Tensor& weight,
                    int64_t stride, const at::Tensor& bias_N,
                    const at::Tensor& y_MN) {
  const at::Tensor a = WithAdjacentElements(a_MK);
  at::Tensor bias;
  if (bias_N.defined()) bias = bias_N.to(at::kFloat).contiguous();
  const int64_t outputs = y_MN.size(1);
  const RowProduct whole{
      .x_BI = a.const_data_ptr<float>(),
      .x_stride = a.stride(0),
      .num_rows = a.size(0),
      .num_inputs = a.size(1),
      .weight_stride = stride,
      .bias_O = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
      .y_BO = y_MN.mutable_data_ptr<float>(),
      .y_stride = y_MN.stride(0),
      .end = outputs};
  if (a.size(0) > kernels::cpu::kFewRows) return RunManyRows(whole, weight);
  const SharedRows rows = RowsOf(weight, outputs, stride);
  ParallelForRows(rows, [&](int64_t begin, int64_t end) {
    RowProduct part = whole;
    part.begin = begin * rows.group_rows;
    part.end = std::min(end * rows.group_rows, outputs);
    RunRowProduct(part, weight, /*first_row=*/0);
  });
}

// The number of columns of b that are copied and multiplied at a time. It is a
// multiple of the columns of every kernel's panel.
constexpr int64_t kSliceColumns = 96;

// The number of terms that are copied at a time. It is a multiple of the terms
// of the parts in which panel_product cuts a sum.
constexpr int64_t kSliceTerms = 384;

// From this many rows on, copying the columns takes a small part of the time.
constexpr int64_t kLeastBlockRows = 128;

// Products of rows of a with slices of b, for one thread. A slice has up to
// kSliceColumns columns. b is f32, or bf16 or in 8 bits with adjacent elements
// of a row. Few rows read an f32 slice where it is; otherwise a slice is copied
// or widened. The bits are the same.
class SliceMultiplier {
 public:
  // If `adds`, adds the product to y, term by term.
  SliceMultiplier(const at::Tensor& a_MK, const at::Tensor& b_KN, bool adds,
                  const at::Tensor& y_MN)
      : b_KN_(b_KN),
        whole_{.left_MK = a_MK.const_data_ptr<float>(),
               .m_stride = a_MK.stride(0),
               .k_stride = a_MK.stride(1),
               .num_rows = a_MK.size(0),
               .num_terms = a_MK.size(1),
               .num_columns = y_MN.size(1),
               .adds = adds,
               .in_order = adds,
               .out_MN = y_MN.mutable_data_ptr<float>(),
               .out_stride = y_MN.stride(0)} {}

  // Computes y for `num_rows` rows and `columns` columns.
  void Run(int64_t row, int64_t num_rows, int64_t column, int64_t columns) {
    PanelProduct part = whole_;
    part.num_rows = num_rows;
    part.num_columns = columns;
    part.out_MN += row * part.out_stride + column;
    part.left_MK += row * part.m_stride;
    for (int64_t term = 0; term < whole_.num_terms; term += kSliceTerms) {
      part.num_terms = std::min(kSliceTerms, whole_.num_terms - term);
      part.adds = whole_.adds || term > 0;
      PlaceSlice(term, column, part);
      kernels::cpu::Kernels().panel_product(part);
      part.left_MK += kSliceTerms * part.k_stride;
    }
  }

 private:
  // Sets the right matrix of `part`, whose first term and column are given.
  void PlaceSlice(int64_t term, int64_t column, PanelProduct& part) {
    const kernels::cpu::KernelTable& kernels = kernels::cpu::Kernels();
    const int64_t stride = b_KN_.stride(0);
    if (b_KN_.scalar_type() == at::kFloat) {
      const float* from = b_KN_.const_data_ptr<float>() + term * stride +
                          column * b_KN_.stride(1);
      if (part.num_rows <= kernels::cpu::kFewRows && b_KN_.stride(1) == 1) {
        part.right_KN = from;
        part.right_stride = stride;
        return;
      }
      kernels.copy_panels({.from_KN = from,
                           .k_stride = stride,
                           .n_stride = b_KN_.stride(1),
                           .num_terms = part.num_terms,
                           .num_columns = part.num_columns,
                           .panels = slice_});
      part.right_KN = slice_;
      return;
    }
    part.right_KN = slice_;
    part.right_stride = kSliceColumns;
    for (int64_t k = 0; k < part.num_terms; ++k) {
      float* to = slice_ + k * kSliceColumns;
      if (IsInt8(b_KN_)) {
        kernels.widen_int8_row(
            b_KN_.const_data_ptr<int8_t>() + (term + k) * stride,
            whole_.num_columns, column, column + part.num_columns, to);
      } else {
        kernels.widen_bf16_row(
            static_cast<const uint16_t*>(b_KN_.const_data_ptr()) +
                (term + k) * stride + column,
            part.num_columns, to);
      }
    }
  }

  const at::Tensor& b_KN_;
  const PanelProduct whole_;
  float* const slice_ = ThreadMemory(kSliceTerms * kSliceColumns);
};

// Computes y = a b, or adds the product to y if `adds`. See SliceMultiplier.
void MultiplyByColumns(const at::Tensor& a_MK, const at::Tensor& b_KN,
                       bool adds, const at::Tensor& y_MN) {
  const int64_t rows = y_MN.size(0), columns = y_MN.size(1);
  const int64_t num_slices = CeilDiv(columns, kSliceColumns);
  // A weight of few columns, such as a router's, has fewer slices than there
  // are threads. So each slice is multiplied with several blocks of rows.
  const int64_t num_threads =
      at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t block_rows = std::max(
      kLeastBlockRows, CeilDiv(rows, CeilDiv(num_threads, num_slices)));
  const int64_t num_blocks = CeilDiv(rows, block_rows);
  // Few columns of few terms are not worth waking a thread.
  const int64_t tasks = num_slices * num_blocks;
  const int64_t step = std::min(tasks, RowGrain(kSliceColumns * b_KN.size(0)));
  ForEachTask(CeilDiv(tasks, step), [&](int64_t, int64_t index) {
    SliceMultiplier slices(a_MK, b_KN, adds, y_MN);
    const int64_t end = std::min(tasks, (index + 1) * step);
    for (int64_t task = index * step; task < end; ++task) {
      const int64_t column = task / num_blocks * kSliceColumns;
      const int64_t row = task % num_blocks * block_rows;
      slices.Run(row, std::min(block_rows, rows - row), column,
                 std::min(kSliceColumns, columns - column));
    }
  });
}

// Returns whether b is W^T, and the elements of a row of W are adjacent.
bool IsTransposed(const at::Tensor& b_KN) { return b_KN.stride(0) == 1; }

// Returns the size of one of b's dimensions: the number of weights, if b is in
// 8 bits.
int64_t NumWeights(const at::Tensor& b_KN, int64_t dimension) {
  const int64_t size = b_KN.size(dimension);
  const bool is_row = b_KN.stride(dimension) == 1;
  return IsInt8(b_KN) && is_row ? kernels::cpu::Int8RowInputs(size) : size;
}

// Computes y = a b + bias_N in f32 on a CPU.
void KernelMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                  const at::Tensor& bias_N, const at::Tensor& y_MN) {
  CheckSizes(a_MK, NumWeights(b_KN, 0), bias_N, y_MN.size(1));
  if (y_MN.numel() == 0) return;
  if (IsTransposed(b_KN)) {
    return MultiplyByRows(a_MK, b_KN, b_KN.stride(1), bias_N, y_MN);
  }
  MultiplyByColumns(a_MK, WithAdjacentElements(b_KN), /*adds=*/false, y_MN);
  if (bias_N.defined()) y_MN.add_(bias_N);
}

at::Tensor Bf16MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                      const at::Tensor& bias_N) {
  at::Tensor y_MN = at::empty({a_MK.size(0), b_KN.size(1)}, a_MK.options());
  Bf16Product(RoundToBf16(a_MK), b_KN, y_MN);
  if (bias_N.defined()) y_MN.add_(bias_N);
  return y_MN;
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
  return AreBf16ProductsAllowed() && HasCpuKernel(a_MK) &&
         b_KN.scalar_type() == at::kBFloat16;
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
  ParallelFor(product.num_groups(), RowGrain(kRowGroup * inputs),
              [&](int64_t begin, int64_t end) { product.Run(begin, end); });
}

void RunRowProduct(const kernels::cpu::RowProduct& item,
                   const at::Tensor& weight, int64_t first_row) {
  const int64_t first = first_row * item.weight_stride;
  const kernels::cpu::KernelTable& kernels = kernels::cpu::Kernels();
  if (weight.scalar_type() == at::kFloat) {
    kernels.row_product_f32(item, weight.const_data_ptr<float>() + first);
  } else if (IsInt8(weight)) {
    kernels.row_product_int8(item, weight.const_data_ptr<int8_t>() + first);
  } else {
    TORCH_CHECK(weight.scalar_type() == at::kBFloat16,
                "a weight of row products is ", weight.scalar_type());
    kernels.row_product_bf16(
        item, static_cast<const uint16_t*>(weight.const_data_ptr()) + first);
  }
}

at::Tensor Linear(const at::Tensor& x_MI, const at::Tensor& weight_OI,
                  const at::Tensor& bias_O) {
  // For few rows, does not make the transposed view of the weight, because that
  // would take a noticeable part of a decode step.
  if (x_MI.size(0) <= kernels::cpu::kFewRows && weight_OI.size(1) > 1 &&
      weight_OI.stride(1) == 1 && TakesKernels(x_MI, weight_OI) &&
      !IsBf16Product(x_MI, weight_OI)) {
    CheckSizes(x_MI, NumWeights(weight_OI, 1), bias_O, weight_OI.size(0));
    at::Tensor y_MO =
        at::empty({x_MI.size(0), weight_OI.size(0)}, x_MI.options());
    MultiplyByRows(x_MI, weight_OI, weight_OI.stride(0), bias_O, y_MO);
    return y_MO;
  }
  return MatMul(x_MI, weight_OI.t(), bias_O);
}

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                  const at::Tensor& bias_N) {
  if (IsBf16Product(a_MK, b_KN)) return Bf16MatMul(a_MK, b_KN, bias_N);
  if (TakesKernels(a_MK, b_KN)) {
    at::Tensor y_MN =
        at::empty({a_MK.size(0), NumWeights(b_KN, 1)}, a_MK.options());
    KernelMatMul(a_MK, b_KN, bias_N, y_MN);
    return y_MN;
  }
  if (IsInt8(b_KN)) return MatMulOfInt8(a_MK, b_KN, bias_N);
  const at::Tensor b = b_KN.to(a_MK.scalar_type());
  return bias_N.defined() ? at::addmm(bias_N.to(a_MK.scalar_type()), a_MK, b)
                          : at::mm(a_MK, b);
}

void AddMatMul(at::Tensor y_MN, const at::Tensor& a_MK, const at::Tensor& b_KN,
               double scale) {
  if (!HasCpuKernel(y_MN) || !HasCpuKernel(a_MK) || !HasCpuKernel(b_KN) ||
      y_MN.stride(1) != 1) {
    at::addmm_out(y_MN, y_MN, a_MK, b_KN, /*beta=*/1, scale);
    return;
  }
  CheckSizes(a_MK, b_KN.size(0), /*bias_N=*/{}, y_MN.size(1));
  TORCH_CHECK(y_MN.size(0) == a_MK.size(0) && y_MN.size(1) == b_KN.size(1),
              "a product of ", a_MK.sizes(), " and ", b_KN.sizes(),
              " is added to ", y_MN.sizes());
  if (y_MN.numel() == 0 || a_MK.size(1) == 0) return;
  // Always scales a: a choice by the sizes would depend on the number of rows.
  const at::Tensor a = scale == 1 ? a_MK : a_MK * scale;
  MultiplyByColumns(a, b_KN.stride(0) == 1 ? b_KN : WithAdjacentElements(b_KN),
                    /*adds=*/true, y_MN);
}

void MatMulInto(const at::Tensor& a_MK, const at::Tensor& b_KN,
                at::Tensor y_MN) {
  if (IsBf16Product(a_MK, b_KN)) {
    Bf16Product(RoundToBf16(a_MK), b_KN, y_MN);
  } else if (TakesKernels(a_MK, b_KN) && y_MN.stride(1) == 1) {
    KernelMatMul(a_MK, b_KN, /*bias_N=*/{}, y_MN);
  } else {
    y_MN.copy_(MatMul(a_MK, b_KN));
  }
}

}  // namespace weft::ops
