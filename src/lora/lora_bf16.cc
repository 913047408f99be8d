#include "src/lora/lora_bf16.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/lora/bf16_panels.h"
#include "src/lora/lora_cpu.h"
#include "src/lora/lora_cpu_rows.h"
#include "src/lora/lora_few_rows.h"
#include "src/lora/row_chunks.h"
#include "src/ops/bf16_product.h"

namespace weft::lora::bf16 {
namespace {

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

// Computes x A^T of the segments that have more than 32 rows and whose adapters
// adapt the site. Legend: as in lora_linear.h.
class ManyRows {
 public:
  ManyRows(const LoraPass& pass, const LoraSite& site,
           const at::TensorOptions& options)
      : pass_(pass), site_(site), results_(pass.routing.size()) {
    for (size_t i = 0; i < results_.size(); ++i) {
      const LoraSegment& segment = pass.routing[i];
      const GroupLayout& group = Group(i);
      if (group.factors.empty() || HasFewRows(segment)) continue;
      AddChunks(pass.routing, i, chunks_);
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

  // Computes x A^T for x in bf16. If `rounded` is defined, also writes
  // scale * (x A^T) to `rounded` in bf16. Each factor begins at an even column
  // of `rounded`.
  void Shrink(const at::Tensor& x, const at::Tensor& rounded) const {
    ForEachChunk(chunks_,
                 {.num_floats = num_floats_,
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
  // writes only the rows of this class's segments.
  [[nodiscard]] at::Tensor EmptyRounded(const at::Tensor& x) const {
    return at::empty({x.size(0), rounded_width_}, x.options());
  }

  // Returns the terms of y += (scale x A^T) B^T for this class's segments.
  [[nodiscard]] std::vector<RowTerms> Expansion() const {
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

  // Moves x A^T of each of this class's segments to its place in `all`.
  void MoveTo(ShrunkInputs& all) {
    for (size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].defined()) all[i] = std::move(results_[i]);
    }
  }

 private:
  [[nodiscard]] const GroupLayout& Group(size_t segment) const {
    return GroupOf(pass_.routing[segment], site_);
  }
  [[nodiscard]] Rows ResultOf(const RowChunk& chunk) const {
    return Rows(results_[chunk.segment])
        .From(chunk.begin - pass_.routing[chunk.segment].begin);
  }

  void ShrinkChunk(const RowChunk& chunk, const RoundedRows& x,
                   const float* panels) const {
    const GroupLayout& group = Group(chunk.segment);
    MultiplyPanels(x.From(chunk.begin), chunk.end - chunk.begin, panels,
                   group.factors.front().in, group.total_rank, ResultOf(chunk));
  }

  void RoundChunk(const RowChunk& chunk, const RoundedRows& to) const {
    int64_t column = 0, rounded_column = 0;
    for (const LoraFactor& factor : Group(chunk.segment).factors) {
      RoundRows(ResultOf(chunk).From(0, column), chunk.end - chunk.begin,
                factor.rank, static_cast<float>(factor.scale),
                to.From(chunk.begin, rounded_column));
      column += factor.rank;
      rounded_column += RoundUpToEven(factor.rank);
    }
  }

  const LoraPass& pass_;
  const LoraSite& site_;
  ShrunkInputs results_;  // x A^T; undefined for skipped segments.
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
  ManyRows many(pass, site, x_TI.options());
  const at::Tensor rounded = many.EmptyRounded(x);
  many.Shrink(x, rounded);
  at::Tensor y_TO = Multiply(x, base.weight_OI.t(), many.Expansion(), rounded);
  if (base.bias_O.defined()) y_TO.add_(base.bias_O);
  shrunk = cpu::ForwardFewRows(x_TI, pass, site, y_TO);
  many.MoveTo(shrunk);
  return y_TO;
}

ShrunkInputs Shrink(const at::Tensor& x_TI, const LoraPass& pass,
                    const LoraSite& site) {
  ManyRows many(pass, site, x_TI.options());
  many.Shrink(ops::RoundToBf16(x_TI), /*rounded=*/{});
  ShrunkInputs shrunk = cpu::ForwardFewRows(x_TI, pass, site, /*y_TO=*/{});
  many.MoveTo(shrunk);
  return shrunk;
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
