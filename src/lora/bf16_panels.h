// Small weights of adapters, rounded and packed for products in bf16, and the
// terms that such a weight adds to a product of the base.
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

  // Returns outputs [begin, end).
  [[nodiscard]] Weight Outputs(int64_t begin, int64_t end) const;
};

// Rows in bf16, whose strides count elements. A row with an odd number of
// elements ends with a zero.
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

// Rounds rows times `scale`.
void RoundRows(const cpu::Rows& x, int64_t num_rows, int64_t num_columns,
               float scale, const RoundedRows& to);

// Returns the size of a weight's panels in f32 numbers.
[[nodiscard]] int64_t PanelFloats(int64_t num_inputs, int64_t num_outputs);

// Rounds and packs a weight. The panels lie at a multiple of 64 bytes, or
// products are slower.
void PackPanels(const Weight& weight, float* panels);

// Computes y = x W for a packed weight.
void MultiplyPanels(const RoundedRows& x, int64_t num_rows, const float* panels,
                    int64_t num_inputs, int64_t num_outputs,
                    const cpu::Rows& y);

// y += x W for columns [column, column + W's outputs) of y. x begins at column
// `x_column` of the rounded rows.
struct Term {
  int64_t column = 0;
  int64_t x_column = 0;
  Weight weight;
};

// The terms of rows [begin, end). Their columns of y and of x are ascending and
// disjoint.
struct RowTerms {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<Term> terms;
};

// Packs terms for a product of the base. It keeps the panel of the last rows
// and outputs, because a thread asks for rows in ascending order. Threads: one
// has its own.
class TermPanels {
 public:
  // `terms` outlives the object; its rows are ascending and disjoint.
  TermPanels(std::span<const RowTerms> terms, const RoundedRows& x)
      : terms_(terms), x_(x) {}

  kernels::cpu::Bf16Terms operator()(ops::Bf16Block& block);

 private:
  // The part of a term in a block of outputs.
  struct Part {
    const Term* term;
    int64_t output;  // Within the block.
    Weight weight;
  };
  void Pack(const RowTerms& rows, const ops::Bf16Block& block);
  // Returns the parts' weights as one, whose inputs are those of all parts,
  // with zeros between them.
  [[nodiscard]] Weight Joined(const std::vector<Part>& parts,
                              int64_t num_outputs);

  std::span<const RowTerms> terms_;
  RoundedRows x_;
  const RowTerms* packed_rows_ = nullptr;
  int64_t packed_output_ = -1;
  int64_t x_column_ = 0;
  int64_t num_inputs_ = 0;  // 0: no terms in these outputs.
  at::Tensor panel_F_;
  std::vector<float> joined_;
};

}  // namespace weft::lora::bf16

#endif  // WEFT_SRC_LORA_BF16_PANELS_H_
