#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/lora/lora_cpu.h"
#include "src/lora/lora_cpu_rows.h"
#include "src/lora/lora_few_rows.h"
#include "src/lora/row_chunks.h"

namespace weft::lora::cpu {
namespace {

using kernels::cpu::Kernels;
using kernels::cpu::PanelFloats;

// The largest number of rows of x A^T that are computed before these rows are
// multiplied by B.
constexpr int64_t kBlockRows = 64;

// Returns the number of floats in a segment's panels: A^T [I, R], then every
// B^T [rank, out].
int64_t NumFloats(const GroupLayout& group) {
  int64_t floats = PanelFloats(group.factors.front().in, group.total_rank);
  for (const LoraFactor& factor : group.factors) {
    floats += PanelFloats(factor.rank, factor.out);
  }
  return floats;
}

void CopyWeights(const LoraSegment& segment, const GroupLayout& group,
                 float* panels) {
  const auto* weights = segment.version->compute_N.const_data_ptr<float>();
  const LoraFactor& first = group.factors.front();
  Kernels().copy_panels({.from_KN = weights + first.a_offset,
                         .k_stride = 1,
                         .n_stride = first.in,
                         .num_terms = first.in,
                         .num_columns = group.total_rank,
                         .panels = panels});
  panels += PanelFloats(first.in, group.total_rank);
  for (const LoraFactor& factor : group.factors) {
    Kernels().copy_panels({.from_KN = weights + factor.b_offset,
                           .k_stride = 1,
                           .n_stride = factor.rank,
                           .num_terms = factor.rank,
                           .num_columns = factor.out,
                           .panels = panels});
    panels += PanelFloats(factor.rank, factor.out);
  }
}

// Writes x A^T of some rows to `shrunk`. If y is not null, also adds the
// products of x A^T and B to y.
void RunRows(const Rows& x, const GroupLayout& group, const ModelShape& shape,
             const float* panels, int64_t num_rows, const Rows& shrunk,
             const Rows& y) {
  const int64_t in = group.factors.front().in;
  Kernels().panel_product({.left_MK = x.data,
                           .m_stride = x.stride,
                           .right_KN = panels,
                           .num_rows = num_rows,
                           .num_terms = in,
                           .num_columns = group.total_rank,
                           .out_MN = shrunk.data,
                           .out_stride = shrunk.stride});
  if (y.data == nullptr) return;
  panels += PanelFloats(in, group.total_rank);
  int64_t column = 0;
  for (const LoraFactor& factor : group.factors) {
    AddExpansion(shrunk.From(0, column), factor.rank, panels,
                 static_cast<float>(factor.scale), num_rows,
                 y.From(0, LoraSite::ColumnOf(factor.module, shape)),
                 factor.out);
    panels += PanelFloats(factor.rank, factor.out);
    column += factor.rank;
  }
}

// Like Forward (lora_cpu.h), but only for segments of more than 32 rows. Sets
// only the elements of `shrunk` for these segments.
void ForwardManyRows(const at::Tensor& x_TI, const LoraPass& pass,
                     const LoraSite& site, const at::Tensor& y_TO,
                     ShrunkInputs& shrunk) {
  const LoraRouting& routing = pass.routing;
  const Rows x(x_TI), y(y_TO);
  std::vector<RowChunk> chunks;
  std::vector<Rows> shrunk_rows;
  ChunkWork work;
  for (size_t i = 0; i < routing.size(); ++i) {
    const GroupLayout& group = GroupOf(routing[i], site);
    if (!group.factors.empty() && !HasFewRows(routing[i])) {
      AddChunks(routing, i, chunks);
      work.num_floats = std::max(work.num_floats, NumFloats(group));
      shrunk[i] =
          at::empty({routing[i].end - routing[i].begin, group.total_rank},
                    x_TI.options());
    }
    shrunk_rows.emplace_back(shrunk[i]);
  }
  if (chunks.empty()) return;
  work.begin = [&](size_t segment, float* panels) {
    CopyWeights(routing[segment], GroupOf(routing[segment], site), panels);
  };
  work.run = [&](size_t i, float* panels) {
    const auto& [segment, begin, end] = chunks[i];
    const GroupLayout& group = GroupOf(routing[segment], site);
    for (int64_t row = begin; row < end; row += kBlockRows) {
      RunRows(x.From(row), group, pass.shape, panels,
              std::min(kBlockRows, end - row),
              shrunk_rows[segment].From(row - routing[segment].begin),
              y.data == nullptr ? y : y.From(row));
    }
  };
  ForEachChunk(chunks, work);
}

}  // namespace

ShrunkInputs ForwardFewRows(const at::Tensor& x_TI, const LoraPass& pass,
                            const LoraSite& site, const at::Tensor& y_TO) {
  at::Tensor few_S;
  if (const int64_t size = NumShrunk(pass.routing, site); size > 0) {
    few_S = at::empty({size}, x_TI.options());
    auto* shrunk_S = few_S.mutable_data_ptr<float>();
    ShrinkFewRows(x_TI.const_data_ptr<float>(), pass.routing, site, shrunk_S);
    if (y_TO.defined()) {
      ExpandFewRows(shrunk_S, pass.routing, site, pass.shape, Rows(y_TO));
    }
  }
  return SplitShrunk(few_S, pass.routing, site);
}

ShrunkInputs Forward(const at::Tensor& x_TI, const LoraPass& pass,
                     const LoraSite& site, const at::Tensor& y_TO) {
  if (pass.routing.empty()) return {};
  ShrunkInputs shrunk = ForwardFewRows(x_TI, pass, site, y_TO);
  ForwardManyRows(x_TI, pass, site, y_TO, shrunk);
  return shrunk;
}

}  // namespace weft::lora::cpu
