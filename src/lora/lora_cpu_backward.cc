#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/lora/lora_cpu.h"
#include "src/ops/thread_team.h"

namespace weft::lora::cpu {
namespace {

using kernels::cpu::Kernels;
using kernels::cpu::PanelFloats;

// The terms of a product with B are cut into parts of this size.
constexpr int64_t kPartColumns = 192;

// The columns of x or dy in a task of the gradients. The number is a multiple
// of the columns of every kernel's panel.
constexpr int64_t kGradientColumns = 96;

// Returns the number of floats in a segment's panels: every B [out, rank], cut
// into parts of kPartColumns rows, then the stacked A [R, I]. Row i of B
// multiplies column i of dy.
int64_t NumPanelFloats(const GroupLayout& group) {
  int64_t floats = PanelFloats(group.total_rank, group.factors.front().in);
  for (const LoraFactor& factor : group.factors) {
    floats += PanelFloats(factor.out, factor.rank);
  }
  return floats;
}

void CopyBackwardPanels(const LoraSegment& segment, const GroupLayout& group,
                        float* panels) {
  const auto* weights = segment.version->compute_N.const_data_ptr<float>();
  for (const LoraFactor& factor : group.factors) {
    for (int64_t begin = 0; begin < factor.out; begin += kPartColumns) {
      const int64_t count = std::min(kPartColumns, factor.out - begin);
      Kernels().copy_panels(
          {.from_KN = weights + factor.b_offset + begin * factor.rank,
           .k_stride = factor.rank,
           .num_terms = count,
           .num_columns = factor.rank,
           .panels = panels});
      panels += PanelFloats(count, factor.rank);
    }
  }
  const LoraFactor& first = group.factors.front();
  Kernels().copy_panels({.from_KN = weights + first.a_offset,
                         .k_stride = first.in,
                         .num_terms = group.total_rank,
                         .num_columns = first.in,
                         .panels = panels});
}

// Computes ds = scale dy B of some rows. ds includes each factor's scale, so
// one product by the stacked A serves all factors. Returns the address of A's
// panels, which follow B's.
const float* MultiplyByB(const Rows& dy, int64_t num_rows,
                         const GroupLayout& group,
                         const model_config::ModelShape& shape,
                         const float* panels, const Rows& ds) {
  int64_t rank_column = 0;
  for (const LoraFactor& factor : group.factors) {
    for (int64_t begin = 0; begin < factor.out; begin += kPartColumns) {
      const int64_t count = std::min(kPartColumns, factor.out - begin);
      Kernels().panel_product(
          {.left_MK =
               dy.From(0, LoraSite::ColumnOf(factor.module, shape) + begin)
                   .data,
           .m_stride = dy.stride,
           .right_KN = panels,
           .num_rows = num_rows,
           .num_terms = count,
           .num_columns = factor.rank,
           .scale = static_cast<float>(factor.scale),
           .adds = begin > 0,
           .out_MN = ds.From(0, rank_column).data,
           .out_stride = ds.stride});
      panels += PanelFloats(count, factor.rank);
    }
    rank_column += factor.rank;
  }
  return panels;
}

class BackwardPass {
 public:
  // Arguments: as those of Backward. Writes ds to the rows of ds_TR that have
  // adapters.
  BackwardPass(const at::Tensor& dy_TO, const at::Tensor& x_TI,
               const LoraPass& pass, const LoraSite& site,
               const ShrunkInputs& shrunk, const at::Tensor& dx_TI,
               const at::Tensor& ds_TR)
      : pass_(pass), site_(site), dy_(dy_TO), x_(x_TI), dx_(dx_TI), ds_(ds_TR) {
    for (const at::Tensor& s_nR : shrunk) shrunk_.emplace_back(s_nR);
  }

  void Run(const LoraGradients& gradients) {
    RunRows();
    AddTasks(gradients);
    ops::ForEachTask(std::ssize(tasks_),
                     [&](int64_t, int64_t i) { RunTask(tasks_[i]); });
  }

 private:
  // Adds to the gradient of an adapter's A, or of one of its B: to the columns
  // of A, or the rows of B, [begin, begin + count).
  struct Task {
    size_t first_segment;  // Of the adapter's segments.
    size_t factor;         // The place of B in the group.
    bool is_a;
    int64_t begin, count;
    float* gradient_N;
  };

  const GroupLayout& Group(size_t segment) const {
    return GroupOf(pass_.routing[segment], site_);
  }

  // Computes ds and adds to dx.
  void RunRows() const {
    std::vector<RowChunk> chunks;
    int64_t num_floats = 0;
    for (size_t i = 0; i < pass_.routing.size(); ++i) {
      if (shrunk_[i].data == nullptr) continue;
      AddChunks(pass_.routing, i, chunks);
      num_floats = std::max(num_floats, NumPanelFloats(Group(i)));
    }
    ForEachChunk(chunks, {.num_floats = num_floats,
                          .begin =
                              [&](size_t segment, float* panels) {
                                CopyBackwardPanels(pass_.routing[segment],
                                                   Group(segment), panels);
                              },
                          .run =
                              [&](size_t i, const float* panels) {
                                RunChunk(chunks[i], panels);
                              }});
  }

  void RunChunk(const RowChunk& chunk, const float* panels) const {
    const GroupLayout& group = Group(chunk.segment);
    const int64_t num_rows = chunk.end - chunk.begin;
    const Rows ds = ds_.From(chunk.begin);
    const float* panels_of_a = MultiplyByB(dy_.From(chunk.begin), num_rows,
                                           group, pass_.shape, panels, ds);
    if (dx_.data == nullptr) return;
    AddExpansion(ds, group.total_rank, panels_of_a, num_rows,
                 dx_.From(chunk.begin), group.factors.front().in);
  }

  void AddTasks(const LoraGradients& gradients) {
    const LoraRouting& routing = pass_.routing;
    for (size_t i = 0; i < routing.size(); ++i) {
      const at::Tensor gradient_N = GradientOf(gradients, routing[i].version);
      if (shrunk_[i].data == nullptr || !gradient_N.defined()) continue;
      const bool is_first = std::none_of(
          routing.begin(), routing.begin() + i, [&](const LoraSegment& other) {
            return other.version == routing[i].version;
          });
      if (is_first) AddTasks(i, gradient_N.mutable_data_ptr<float>());
    }
  }

  void AddTasks(size_t segment, float* gradient_N) {
    const std::vector<LoraFactor>& factors = Group(segment).factors;
    const auto add = [&](size_t factor, bool is_a, int64_t features) {
      for (int64_t begin = 0; begin < features; begin += kGradientColumns) {
        tasks_.push_back({segment, factor, is_a, begin,
                          std::min(kGradientColumns, features - begin),
                          gradient_N});
      }
    };
    add(0, /*is_a=*/true, factors.front().in);
    for (size_t i = 0; i < factors.size(); ++i) {
      add(i, /*is_a=*/false, factors[i].out);
    }
  }

  void RunTask(const Task& task) const {
    const LoraRouting& routing = pass_.routing;
    for (size_t i = task.first_segment; i < routing.size(); ++i) {
      if (routing[i].version != routing[task.first_segment].version) continue;
      Kernels().panel_product(task.is_a ? GradientOfA(task, i)
                                        : GradientOfB(task, i));
    }
  }

  // Returns dA += ds^T x, for a segment's rows.
  kernels::cpu::PanelProduct GradientOfA(const Task& task, size_t i) const {
    const LoraSegment& segment = pass_.routing[i];
    const GroupLayout& group = Group(i);
    const LoraFactor& first = group.factors.front();
    return {.left_MK = ds_.From(segment.begin).data,
            .m_stride = 1,
            .k_stride = ds_.stride,
            .right_KN = x_.From(segment.begin, task.begin).data,
            .right_stride = x_.stride,
            .num_rows = group.total_rank,
            .num_terms = segment.end - segment.begin,
            .num_columns = task.count,
            .adds = true,
            .in_order = true,
            .out_MN = task.gradient_N + first.a_offset + task.begin,
            .out_stride = first.in};
  }

  // Returns dB += dy^T s, for a segment's rows.
  kernels::cpu::PanelProduct GradientOfB(const Task& task, size_t i) const {
    const LoraSegment& segment = pass_.routing[i];
    const std::vector<LoraFactor>& factors = Group(i).factors;
    const LoraFactor& factor = factors[task.factor];
    int64_t rank_column = 0;
    for (size_t f = 0; f < task.factor; ++f) rank_column += factors[f].rank;
    const int64_t column =
        LoraSite::ColumnOf(factor.module, pass_.shape) + task.begin;
    return {
        .left_MK = dy_.From(segment.begin, column).data,
        .m_stride = 1,
        .k_stride = dy_.stride,
        .right_KN = shrunk_[i].From(0, rank_column).data,
        .right_stride = shrunk_[i].stride,
        .num_rows = task.count,
        .num_terms = segment.end - segment.begin,
        .num_columns = factor.rank,
        .adds = true,
        .in_order = true,
        .out_MN = task.gradient_N + factor.b_offset + task.begin * factor.rank,
        .out_stride = factor.rank};
  }

  const LoraPass& pass_;
  const LoraSite& site_;
  const Rows dy_, x_, dx_;
  const Rows ds_;
  std::vector<Rows> shrunk_;
  std::vector<Task> tasks_;
};

// Returns the largest R of a segment.
int64_t LargestRank(const LoraPass& pass, const LoraSite& site) {
  int64_t rank = 0;
  for (const LoraSegment& segment : pass.routing) {
    rank = std::max<int64_t>(rank, GroupOf(segment, site).total_rank);
  }
  return rank;
}

}  // namespace

void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const LoraPass& pass, const LoraSite& site,
              const ShrunkInputs& shrunk, const LoraGradients& gradients,
              const at::Tensor& dx_TI) {
  const int64_t rank = LargestRank(pass, site);
  if (rank == 0) return;
  const at::Tensor ds_TR = at::empty({dy_TO.size(0), rank}, dy_TO.options());
  BackwardPass(dy_TO, x_TI, pass, site, shrunk, dx_TI, ds_TR).Run(gradients);
}

at::Tensor AddGradients(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                        const LoraPass& pass, const LoraSite& site,
                        const ShrunkInputs& shrunk,
                        const LoraGradients& gradients) {
  at::Tensor ds_TR =
      at::zeros({dy_TO.size(0), LargestRank(pass, site)}, dy_TO.options());
  BackwardPass(dy_TO, x_TI, pass, site, shrunk, /*dx_TI=*/{}, ds_TR)
      .Run(gradients);
  return ds_TR;
}

}  // namespace weft::lora::cpu
