#include "src/lora/lora_bf16.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/bf16_product.h"
#include "src/lora/lora_cpu.h"
#include "src/ops/matmul.h"

namespace weft::lora::bf16 {
namespace {

// A weight [inputs, outputs] in f32. One of the strides is 1.
struct Weight {
  const float* data = nullptr;
  int64_t input_stride = 0;
  int64_t output_stride = 0;
  int64_t num_inputs = 0;
  int64_t num_outputs = 0;

  // Returns a view of the outputs [begin, end).
  Weight Outputs(int64_t begin, int64_t end) const;
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

  RoundedRows From(int64_t row, int64_t column = 0) const {
    return {data + row * stride + column, stride};
  }
};

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
// (ops/matmul.h).
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
  Weight Joined(const std::vector<Part>& parts, int64_t num_outputs);

  std::span<const RowTerms> terms_;
  RoundedRows x_;
  int64_t x_column_ = 0;
  int64_t num_inputs_ = 0;  // 0 if no term has outputs of the block.
  at::Tensor panel_F_;
  std::vector<float> joined_;
};

using kernels::cpu::kBf16PanelInputs;
using kernels::cpu::kBf16PanelOutputs;

// Returns the size of a panel in floats, each of which holds two bf16 elements.
int64_t FloatsOfPanel(int64_t num_inputs) {
  return (num_inputs + 1) / 2 * kBf16PanelOutputs;
}

// Rounds and packs a weight that fits in one panel.
void Round(const Weight& weight, float* panel) {
  ops::Bf16Table().round_panel({.weight = weight.data,
                                .input_stride = weight.input_stride,
                                .output_stride = weight.output_stride,
                                .num_inputs = weight.num_inputs,
                                .num_outputs = weight.num_outputs},
                               /*scale=*/1, reinterpret_cast<uint16_t*>(panel));
}

// Calls f(first input, number of inputs, first output, number of outputs,
// offset in floats) for every panel of a weight.
template <typename Function>
void ForEachPanel(int64_t num_inputs, int64_t num_outputs, Function f) {
  int64_t offset = 0;
  for (int64_t output = 0; output < num_outputs; output += kBf16PanelOutputs) {
    for (int64_t input = 0; input < num_inputs; input += kBf16PanelInputs) {
      const int64_t inputs = std::min(kBf16PanelInputs, num_inputs - input);
      f(input, inputs, output,
        std::min(kBf16PanelOutputs, num_outputs - output), offset);
      offset += FloatsOfPanel(inputs);
    }
  }
}

Weight Weight::Outputs(int64_t begin, int64_t end) const {
  Weight part = *this;
  part.data += begin * output_stride;
  part.num_outputs = end - begin;
  return part;
}

// Rounds x to bf16 and writes the result to `to`.
void RoundRows(const cpu::Rows& x, int64_t num_rows, int64_t num_columns,
               const RoundedRows& to) {
  for (int64_t row = 0; row < num_rows; ++row) {
    ops::Bf16Table().round_row(x.From(row).data, /*scale=*/1, num_columns,
                               to.From(row).data);
  }
}

// Returns how many floats the panels of a weight take. A panel is a block of a
// bf16 weight in the order in which kernels read it.
int64_t PanelFloats(int64_t num_inputs, int64_t num_outputs) {
  int64_t floats = 0;
  ForEachPanel(num_inputs, num_outputs,
               [&](int64_t, int64_t inputs, int64_t, int64_t, int64_t offset) {
                 floats = offset + FloatsOfPanel(inputs);
               });
  return floats;
}

// Rounds a weight and packs it into panels. Products are fastest if `panels` is
// aligned to 64 bytes.
void PackPanels(const Weight& weight, float* panels) {
  ForEachPanel(weight.num_inputs, weight.num_outputs,
               [&](int64_t input, int64_t inputs, int64_t output,
                   int64_t outputs, int64_t offset) {
                 Weight part = weight.Outputs(output, output + outputs);
                 part.data += input * weight.input_stride;
                 part.num_inputs = inputs;
                 Round(part, panels + offset);
               });
}

// Computes y = x W for a packed weight.
void MultiplyPanels(const RoundedRows& x, int64_t num_rows, const float* panels,
                    int64_t num_inputs, int64_t num_outputs,
                    const cpu::Rows& y) {
  ForEachPanel(
      num_inputs, num_outputs,
      [&](int64_t input, int64_t inputs, int64_t output, int64_t outputs,
          int64_t offset) {
        ops::Bf16Table().multiply_panel(
            {.x = x.From(0, input).data,
             .x_row_stride = x.stride,
             .num_rows = num_rows,
             .panel = reinterpret_cast<const uint16_t*>(panels + offset),
             .num_inputs = inputs,
             .num_outputs = outputs,
             .adds = input > 0,
             .y_BO = y.From(0, output).data,
             .y_stride = y.stride});
      });
}

Weight TermPanels::Joined(const std::vector<Part>& parts, int64_t num_outputs) {
  const Part& last = parts.back();
  const int64_t first_column = parts.front().term->x_column;
  const int64_t num_inputs =
      last.term->x_column + last.weight.num_inputs - first_column;
  joined_.assign(num_inputs * num_outputs, 0);
  for (const Part& part : parts) {
    const Weight& weight = part.weight;
    for (int64_t o = 0; o < weight.num_outputs; ++o) {
      float* to = joined_.data() + (part.output + o) * num_inputs +
                  part.term->x_column - first_column;
      for (int64_t i = 0; i < weight.num_inputs; ++i) {
        to[i] = weight.data[i * weight.input_stride + o * weight.output_stride];
      }
    }
  }
  return {.data = joined_.data(),
          .input_stride = 1,
          .output_stride = num_inputs,
          .num_inputs = num_inputs,
          .num_outputs = num_outputs};
}

void TermPanels::Pack(const RowTerms& rows, const ops::Bf16Block& block) {
  num_inputs_ = 0;
  std::vector<Part> parts;
  const int64_t block_end = block.output + block.num_outputs;
  for (const Term& term : rows.terms) {
    const int64_t begin = std::max(block.output, term.column);
    const int64_t end =
        std::min(block_end, term.column + term.weight.num_outputs);
    if (begin >= end) continue;
    parts.push_back({.term = &term,
                     .output = begin - block.output,
                     .weight = term.weight.Outputs(begin - term.column,
                                                   end - term.column)});
  }
  if (parts.empty()) return;
  const bool is_whole = parts.size() == 1 &&
                        parts.front().weight.num_outputs == block.num_outputs;
  const Weight weight =
      is_whole ? parts.front().weight : Joined(parts, block.num_outputs);
  x_column_ = parts.front().term->x_column;
  num_inputs_ = weight.num_inputs;
  const int64_t floats = FloatsOfPanel(num_inputs_);
  if (!panel_F_.defined() || panel_F_.size(0) < floats) {
    panel_F_ = at::empty({floats}, at::kFloat);
  }
  Round(weight, panel_F_.mutable_data_ptr<float>());
}

kernels::cpu::Bf16Terms TermPanels::operator()(ops::Bf16Block& block) {
  // Finds the first RowTerms that end after the block's first row.
  const auto rows = std::ranges::find_if(
      terms_, [&](const RowTerms& terms) { return terms.end > block.row; });
  if (rows == terms_.end()) return {};
  if (rows->begin > block.row) {
    block.num_rows = std::min(block.num_rows, rows->begin - block.row);
    return {};
  }
  block.num_rows = std::min(block.num_rows, rows->end - block.row);
  Pack(*rows, block);
  if (num_inputs_ == 0) return {};
  return {.x = x_.From(block.row, x_column_).data,
          .x_row_stride = x_.stride,
          .panel = reinterpret_cast<const uint16_t*>(
              panel_F_.const_data_ptr<float>()),
          .num_inputs = num_inputs_};
}

using cpu::RowChunk;
using cpu::Rows;

int64_t RoundUpToEven(int64_t count) { return count + count % 2; }

// Returns the stacked A^T [I, R].
Weight WeightOfA(const LoraSegment& segment, const GroupLayout& group) {
  const LoraFactor& first = group.factors.front();
  return {.data = segment.version->compute_N.const_data_ptr<float>() +
                  first.a_offset,
          .input_stride = 1,
          .output_stride = first.in,
          .num_inputs = first.in,
          .num_outputs = group.total_rank};
}

// Returns B^T [rank, out].
Weight WeightOfB(const LoraSegment& segment, const LoraFactor& factor) {
  return {.data = segment.version->compute_N.const_data_ptr<float>() +
                  factor.b_offset,
          .input_stride = 1,
          .output_stride = factor.rank,
          .num_inputs = factor.rank,
          .num_outputs = factor.out};
}

// Computes scale x A^T of the segments whose adapters adapt the site. Legend:
// as in lora_linear.h.
class ShrunkRows {
 public:
  ShrunkRows(const LoraPass& pass, const LoraSite& site,
             const at::TensorOptions& options)
      : pass_(pass), site_(site), results_(pass.routing.size()) {
    for (size_t i = 0; i < results_.size(); ++i) {
      const LoraSegment& segment = pass.routing[i];
      const GroupLayout& group = Group(i);
      if (group.factors.empty()) continue;
      cpu::AddChunks(pass.routing, i, chunks_);
      results_[i] =
          at::empty({segment.end - segment.begin, group.total_rank}, options);
      num_floats_ = std::max(
          num_floats_, PanelFloats(group.factors.front().in, group.total_rank));
      int64_t width = 0;
      for (const LoraFactor& factor : group.factors) {
        width += RoundUpToEven(factor.rank);
      }
      rounded_width_ = std::max(rounded_width_, width);
    }
  }

  // Computes scale x A^T for x in bf16. If `rounded` is defined, also writes
  // the result to `rounded` in bf16. Each factor begins at an even column of
  // `rounded`.
  void Shrink(const at::Tensor& x, const at::Tensor& rounded) const {
    cpu::ForEachChunk(
        chunks_, {.num_floats = num_floats_,
                  .begin =
                      [&](size_t segment, float* panels) {
                        PackPanels(
                            WeightOfA(pass_.routing[segment], Group(segment)),
                            panels);
                      },
                  .run =
                      [&](size_t i, const float* panels) {
                        ShrinkChunk(chunks_[i], RoundedRows(x), panels);
                        if (rounded.defined()) {
                          RoundChunk(chunks_[i], RoundedRows(rounded));
                        }
                      }});
  }

  // Allocates the `rounded` argument of Shrink, with all rows of x. Shrink
  // writes only the rows that have adapters.
  at::Tensor EmptyRounded(const at::Tensor& x) const {
    return at::empty({x.size(0), rounded_width_}, x.options());
  }

  // Returns the terms of y += (scale x A^T) B^T.
  std::vector<RowTerms> Expansion() const {
    std::vector<RowTerms> all;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (!results_[i].defined()) continue;
      const LoraSegment& segment = pass_.routing[i];
      RowTerms rows = {.begin = segment.begin, .end = segment.end};
      int64_t x_column = 0;
      for (const LoraFactor& factor : Group(i).factors) {
        rows.terms.push_back(
            {.column = LoraSite::ColumnOf(factor.module, pass_.shape),
             .x_column = x_column,
             .weight = WeightOfB(segment, factor)});
        x_column += RoundUpToEven(factor.rank);
      }
      all.push_back(std::move(rows));
    }
    return all;
  }

  ShrunkInputs Take() && { return std::move(results_); }

 private:
  const GroupLayout& Group(size_t segment) const {
    return GroupOf(pass_.routing[segment], site_);
  }
  Rows ResultOf(const RowChunk& chunk) const {
    return Rows(results_[chunk.segment])
        .From(chunk.begin - pass_.routing[chunk.segment].begin);
  }

  void ShrinkChunk(const RowChunk& chunk, const RoundedRows& x,
                   const float* panels) const {
    const GroupLayout& group = Group(chunk.segment);
    const int64_t num_rows = chunk.end - chunk.begin;
    Rows result = ResultOf(chunk);
    MultiplyPanels(x.From(chunk.begin), num_rows, panels,
                   group.factors.front().in, group.total_rank, result);
    for (const LoraFactor& factor : group.factors) {
      cpu::ScaleColumns(result, num_rows, factor.rank, factor.scale);
      result = result.From(0, factor.rank);
    }
  }

  void RoundChunk(const RowChunk& chunk, const RoundedRows& to) const {
    int64_t column = 0, rounded_column = 0;
    for (const LoraFactor& factor : Group(chunk.segment).factors) {
      RoundRows(ResultOf(chunk).From(0, column), chunk.end - chunk.begin,
                factor.rank, to.From(chunk.begin, rounded_column));
      column += factor.rank;
      rounded_column += RoundUpToEven(factor.rank);
    }
  }

  const LoraPass& pass_;
  const LoraSite& site_;
  ShrunkInputs results_;  // Undefined for segments without factors.
  std::vector<RowChunk> chunks_;
  int64_t num_floats_ = 0;
  int64_t rounded_width_ = 0;
};

// Returns the terms of dx += ds A.
std::vector<RowTerms> InputGradient(const LoraPass& pass,
                                    const LoraSite& site) {
  std::vector<RowTerms> all;
  for (const LoraSegment& segment : pass.routing) {
    const GroupLayout& group = GroupOf(segment, site);
    if (group.factors.empty()) continue;
    Weight weight = WeightOfA(segment, group);
    std::swap(weight.input_stride, weight.output_stride);
    std::swap(weight.num_inputs, weight.num_outputs);
    all.push_back({.begin = segment.begin,
                   .end = segment.end,
                   .terms = {{.weight = weight}}});
  }
  return all;
}

// Returns x W plus the terms. `rounded` is the left operand of the terms.
at::Tensor Multiply(const at::Tensor& x, const at::Tensor& weight_KN,
                    const std::vector<RowTerms>& terms,
                    const at::Tensor& rounded) {
  at::Tensor y =
      at::empty({x.size(0), weight_KN.size(1)}, x.options().dtype(at::kFloat));
  ops::MakeTermsOfBlock make_terms;
  if (!terms.empty()) {
    make_terms = [&] { return TermPanels(terms, RoundedRows(rounded)); };
  }
  ops::Bf16Product(x, weight_KN, y, make_terms);
  return y;
}

}  // namespace

at::Tensor Forward(const at::Tensor& x_TI, const BaseLinear& base,
                   const LoraPass& pass, const LoraSite& site,
                   ShrunkInputs& shrunk) {
  const at::Tensor x = ops::RoundToBf16(x_TI);
  ShrunkRows rows(pass, site, x_TI.options());
  const at::Tensor rounded = rows.EmptyRounded(x);
  rows.Shrink(x, rounded);
  at::Tensor y_TO = Multiply(x, base.weight_OI.t(), rows.Expansion(), rounded);
  if (base.bias_O.defined()) y_TO.add_(base.bias_O);
  shrunk = std::move(rows).Take();
  return y_TO;
}

ShrunkInputs Shrink(const at::Tensor& x_TI, const LoraPass& pass,
                    const LoraSite& site) {
  ShrunkRows rows(pass, site, x_TI.options());
  rows.Shrink(ops::RoundToBf16(x_TI), /*rounded=*/{});
  return std::move(rows).Take();
}

at::Tensor Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                    const BaseLinear& base, const LoraPass& pass,
                    const LoraSite& site, const ShrunkInputs& shrunk,
                    const LoraGradients& gradients, bool want_input_gradient) {
  const at::Tensor ds_TR =
      cpu::AddGradients(dy_TO, x_TI, pass, site, shrunk, gradients);
  if (!want_input_gradient) return {};
  return Multiply(ops::RoundToBf16(dy_TO), base.weight_OI,
                  InputGradient(pass, site), ops::RoundToBf16(ds_TR));
}

}  // namespace weft::lora::bf16
