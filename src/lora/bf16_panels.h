// Rounds and packs small weights of adapters for products in bf16. Also packs
// the terms that adapters add to a base product.
//
// A panel is a block of a bf16 weight in the order in which kernels read it.
#ifndef WEFT_SRC_LORA_BF16_PANELS_H_
#define WEFT_SRC_LORA_BF16_PANELS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "src/lora/lora_cpu_rows.h"
#include "src/ops/bf16_product.h"

namespace weft::lora::bf16 {

// A weight [inputs, outputs] in f32. One of the strides is 1.
struct Weight {
  const float* data = nullptr;
  int64_t input_stride = 0;
  int64_t output_stride = 0;
  int64_t num_inputs = 0;
  int64_t num_outputs = 0;

  // Returns a view of the outputs [begin, end).
  [[nodiscard]] Weight Outputs(int64_t begin, int64_t end) const;
};

// A matrix in bf16. `stride` counts elements from row to row. If rows have an
// odd number of elements, a zero follows each row.
struct RoundedRows {
  uint16_t* data = nullptr;
  int64_t stride = 0;

  explicit RoundedRows(const at::Tensor& rows)
      : data(static_cast<uint16_t*>(rows.mutable_data_ptr())),
        stride(rows.stride(0)) {}
  RoundedRows(uint16_t* first, int64_t row_stride)
      : data(first), stride(row_stride) {}

  [[nodiscard]] RoundedRows From(int64_t row, int64_t column = 0) const {
    return {data + row * stride + column, stride};
  }
};

// Rounds scale * x to bf16 and writes the result to `to`.
void RoundRows(const cpu::Rows& x, int64_t num_rows, int64_t num_columns,
               float scale, const RoundedRows& to);

// Returns how many floats the panels of a weight take.
[[nodiscard]] int64_t PanelFloats(int64_t num_inputs, int64_t num_outputs);

// Rounds a weight and packs it into panels. Products are fastest if `panels` is
// aligned to 64 bytes.
void PackPanels(const Weight& weight, float* panels);

// Computes y = x W for a packed weight.
void MultiplyPanels(const RoundedRows& x, int64_t num_rows, const float* panels,
                    int64_t num_inputs, int64_t num_outputs,
                    const cpu::Rows& y);

// A term of a product: y += x W for the columns [column, column + W's outputs)
// of y. x starts at column `x_column` of the rounded rows.
struct Term {
  int64_t column = 0;
  int64_t x_column = 0;
  Weight weight;
};

// The terms of the rows [begin, end). Both in y and in x, the columns of the
// terms are ascending and disjoint.
struct RowTerms {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<Term> terms;
};

// Packs the terms of a base product. An object serves as a TermsOfBlock
// (ops/bf16_product.h).
// Threads: each thread has its own object.
class TermPanels {
 public:
  // `terms` outlives the object. The ranges of rows in `terms` are ascending
  // and disjoint.
  TermPanels(std::span<const RowTerms> terms, const RoundedRows& x)
      : terms_(terms), x_(x) {}

  kernels::cpu::Bf16Terms operator()(ops::Bf16Block& block);

 private:
  // The part of a term that belongs to a block of outputs.
  struct Part {
    const Term* term;
    int64_t output;  // The part's first output, counted within the block.
    Weight weight;
  };
  // Packs those terms in `rows` whose outputs overlap the block's outputs.
  void Pack(const RowTerms& rows, const ops::Bf16Block& block);
  // Returns one weight with the inputs of all parts and `num_outputs` outputs.
  // Elements that belong to no part are zero.
  [[nodiscard]] Weight Joined(const std::vector<Part>& parts,
                              int64_t num_outputs);

  std::span<const RowTerms> terms_;
  RoundedRows x_;
  int64_t x_column_ = 0;
  int64_t num_inputs_ = 0;  // 0 if no term has outputs of the block.
  at::Tensor panel_F_;
  std::vector<float> joined_;
};

}  // namespace weft::lora::bf16

#endif  // WEFT_SRC_LORA_BF16_PANELS_H_
