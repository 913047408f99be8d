#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/lora/lora_cpu.h"

namespace weft::lora::cpu {
namespace {

using kernels::cpu::Kernels;
using kernels::cpu::PanelFloats;
using kernels::cpu::PartSum;

// A block has up to kBackwardBlockRows rows of a chunk. A slice has up to
// kSliceColumns columns of a block's dy. The slice stays in the second-level
// cache while it is multiplied by B and by x A^T. kSliceColumns is a multiple
// of the width of every kernel's panel.
constexpr int64_t kBackwardBlockRows = 256;
constexpr int64_t kSliceColumns = 192;

// Returns the number of floats in a segment's panels: every B [out, rank], cut
// into slices of kSliceColumns rows, then the stacked A [R, I]. Row i of B
// multiplies column i of dy.
int64_t NumPanelFloats(const GroupLayout& group) {
  int64_t floats = PanelFloats(group.total_rank, group.factors.front().in);
  for (const LoraFactor& factor : group.factors) {
    floats += PanelFloats(factor.out, factor.rank);
  }
  return floats;
}

// Returns the number of floats in the sums of a chunk: dA [R, I], then every
// dB^T [rank, out].
int64_t NumSums(const GroupLayout& group) {
  int64_t floats = group.total_rank * group.factors.front().in;
  for (const LoraFactor& factor : group.factors) {
    floats += factor.rank * factor.out;
  }
  return floats;
}

void CopyBackwardPanels(const LoraSegment& segment, const GroupLayout& group,
                        float* panels) {
  const auto* weights = segment.version->compute_N.const_data_ptr<float>();
  for (const LoraFactor& factor : group.factors) {
    for (int64_t begin = 0; begin < factor.out; begin += kSliceColumns) {
      const int64_t count = std::min(kSliceColumns, factor.out - begin);
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

// The rows of one block, at most kBackwardBlockRows.
struct Block {
  int64_t num_rows;
  Rows dy, x, shrunk, ds, dx;
  float* sums;  // Null if the adapter does not learn.
  bool adds;    // If true, adds to the sums; otherwise overwrites them.
};

// Computes ds. If the adapter learns, also adds the block's part of dB to the
// sums, or overwrites the sums (Block::adds). Both products read a slice of dy
// while the slice is in the cache. ds includes each factor's scale, so one
// product by the stacked A serves all factors. Returns the address of A's
// panels, which follow B's.
const float* MultiplyByB(const Block& block, const GroupLayout& group,
                         const model_config::ModelShape& shape,
                         const float* panels) {
  float* sums = block.sums;
  if (sums != nullptr) sums += group.total_rank * group.factors.front().in;
  int64_t rank_column = 0;
  for (const LoraFactor& factor : group.factors) {
    const Rows ds = block.ds.From(0, rank_column);
    const Rows shrunk = block.shrunk.From(0, rank_column);
    const auto scale = static_cast<float>(factor.scale);
    for (int64_t begin = 0; begin < factor.out; begin += kSliceColumns) {
      const int64_t count = std::min(kSliceColumns, factor.out - begin);
      const Rows dy =
          block.dy.From(0, LoraSite::ColumnOf(factor.module, shape) + begin);
      Kernels().panel_product({.left_MK = dy.data,
                               .m_stride = dy.stride,
                               .right_KN = panels,
                               .num_rows = block.num_rows,
                               .num_terms = count,
                               .num_columns = factor.rank,
                               .scale = scale,
                               .adds = begin > 0,
                               .out_MN = ds.data,
                               .out_stride = ds.stride});
      panels += PanelFloats(count, factor.rank);
      if (sums == nullptr) continue;
      Kernels().panel_product({.left_MK = shrunk.data,
                               .m_stride = 1,
                               .k_stride = shrunk.stride,
                               .right_KN = dy.data,
                               .right_stride = dy.stride,
                               .num_rows = factor.rank,
                               .num_terms = block.num_rows,
                               .num_columns = count,
                               .scale = scale,
                               .adds = block.adds,
                               .out_MN = sums + begin,
                               .out_stride = factor.out});
    }
    if (sums != nullptr) sums += factor.rank * factor.out;
    rank_column += factor.rank;
  }
  return panels;
}

void RunBlock(const Block& block, const GroupLayout& group,
              const model_config::ModelShape& shape, const float* panels) {
  const float* panels_of_a = MultiplyByB(block, group, shape, panels);
  const int64_t in = group.factors.front().in;
  if (block.sums != nullptr) {
    Kernels().panel_product({.left_MK = block.ds.data,
                             .m_stride = 1,
                             .k_stride = block.ds.stride,
                             .right_KN = block.x.data,
                             .right_stride = block.x.stride,
                             .num_rows = group.total_rank,
                             .num_terms = block.num_rows,
                             .num_columns = in,
                             .adds = block.adds,
                             .out_MN = block.sums,
                             .out_stride = in});
  }
  if (block.dx.data != nullptr) {
    AddExpansion(block.ds, group.total_rank, panels_of_a, /*scale=*/1,
                 block.num_rows, block.dx, in);
  }
}

// Appends to `sums` the tasks that add the results of `num_parts` chunks to
// `gradient`. Different threads may run different tasks.
void AddSums(const GroupLayout& group, const float* parts, int64_t num_parts,
             float* gradient, std::vector<PartSum>& sums) {
  const int64_t part_stride = NumSums(group);
  const auto add = [&](int64_t rank, int64_t features, float* out,
                       int64_t m_stride, int64_t n_stride) {
    for (int64_t begin = 0; begin < features; begin += kSliceColumns) {
      sums.push_back({.parts = parts + begin,
                      .row_stride = features,
                      .part_stride = part_stride,
                      .num_parts = num_parts,
                      .num_rows = rank,
                      .num_columns = std::min(kSliceColumns, features - begin),
                      .out_MN = out + begin * n_stride,
                      .m_stride = m_stride,
                      .n_stride = n_stride});
    }
    parts += rank * features;
  };
  const LoraFactor& first = group.factors.front();
  add(group.total_rank, first.in, gradient + first.a_offset, first.in, 1);
  for (const LoraFactor& factor : group.factors) {
    add(factor.rank, factor.out, gradient + factor.b_offset, 1, factor.rank);
  }
}

// The chunks of one adapter, which may have several segments.
struct Learner {
  float* gradient = nullptr;  // Null if the adapter does not learn.
  size_t first_chunk = 0;
  int64_t num_chunks = 0;
  // The sums of the chunks, one after another. Null if the adapter does not
  // learn, or if it has only one chunk. The thread that computes a single chunk
  // also adds the chunk's sums to the gradient.
  float* sums = nullptr;
};

class BackwardPass {
 public:
  BackwardPass(const at::Tensor& dy_TO, const at::Tensor& x_TI,
               const LoraPass& pass, const LoraSite& site,
               const ShrunkInputs& shrunk, const at::Tensor& dx_TI,
               const at::Tensor& ds_TR = {})
      : pass_(pass), site_(site), dy_(dy_TO), x_(x_TI), dx_(dx_TI), ds_(ds_TR) {
    for (const at::Tensor& s_nR : shrunk) shrunk_.emplace_back(s_nR);
  }

  void Run(const LoraGradients& gradients) {
    const std::vector<LoraSegment>& routing = pass_.routing;
    std::vector<bool> seen(routing.size());
    for (size_t i = 0; i < routing.size(); ++i) {
      if (!seen[i] && shrunk_[i].data != nullptr)
        AddLearner(i, gradients, seen);
    }
    ReserveSums();
    ForEachChunk(
        chunks_,
        {.num_floats = num_floats_,
         .begin =
             [&](size_t segment, float* memory) {
               CopyBackwardPanels(routing[segment], Group(segment), memory);
             },
         .run = [&](size_t chunk, float* memory) { RunChunk(chunk, memory); }});
    std::vector<PartSum> sums;
    for (const Learner& learner : learners_) {
      if (learner.sums == nullptr) continue;
      AddSums(Group(chunks_[learner.first_chunk].segment), learner.sums,
              learner.num_chunks, learner.gradient, sums);
    }
    ForEachOf(sums.size(), [&](size_t i) { Kernels().add_parts(sums[i]); });
  }

 private:
  const GroupLayout& Group(size_t segment) const {
    return GroupOf(pass_.routing[segment], site_);
  }

  // Adds a Learner for a segment's adapter, and the chunks of all segments of
  // that adapter. Sets `seen` for these segments.
  void AddLearner(size_t segment, const LoraGradients& gradients,
                  std::vector<bool>& seen) {
    const std::vector<LoraSegment>& routing = pass_.routing;
    const AdapterVersionPtr& version = routing[segment].version;
    const at::Tensor gradient_N = GradientOf(gradients, version);
    Learner learner{.first_chunk = chunks_.size()};
    if (gradient_N.defined()) {
      learner.gradient = gradient_N.mutable_data_ptr<float>();
    }
    for (size_t i = segment; i < routing.size(); ++i) {
      if (routing[i].version != version) continue;
      seen[i] = true;
      AddChunks(routing, i, chunks_);
    }
    learner.num_chunks = chunks_.size() - learner.first_chunk;
    learner_of_chunk_.resize(chunks_.size(), learners_.size());
    learners_.push_back(learner);
    const GroupLayout& group = Group(segment);
    num_floats_ =
        std::max(num_floats_, NumPanelFloats(group) +
                                  kBackwardBlockRows * group.total_rank +
                                  NumSums(group));
  }

  void ReserveSums() {
    int64_t size = 0;
    const auto size_of = [this](const Learner& learner) {
      if (learner.gradient == nullptr || learner.num_chunks == 1)
        return int64_t{0};
      return learner.num_chunks *
             NumSums(Group(chunks_[learner.first_chunk].segment));
    };
    for (const Learner& learner : learners_) size += size_of(learner);
    sums_S_ = at::empty({size}, at::kFloat);
    auto* next = sums_S_.mutable_data_ptr<float>();
    for (Learner& learner : learners_) {
      if (size_of(learner) > 0) learner.sums = next;
      next += size_of(learner);
    }
  }

  // `memory` has the panels of the weights, then room for ds and for sums.
  void RunChunk(size_t index, float* memory) const {
    const auto& [segment, begin, end] = chunks_[index];
    const Learner& learner = learners_[learner_of_chunk_[index]];
    const GroupLayout& group = Group(segment);
    const int64_t rank = group.total_rank;
    float* ds = memory + NumPanelFloats(group);
    float* sums = nullptr;
    if (learner.sums != nullptr) {
      sums = learner.sums + (index - learner.first_chunk) * NumSums(group);
    } else if (learner.gradient != nullptr) {
      sums = ds + kBackwardBlockRows * rank;
    }
    for (int64_t row = begin; row < end; row += kBackwardBlockRows) {
      RunBlock(
          {.num_rows = std::min(kBackwardBlockRows, end - row),
           .dy = dy_.From(row),
           .x = x_.From(row),
           .shrunk = shrunk_[segment].From(row - pass_.routing[segment].begin),
           .ds = ds_.data == nullptr ? Rows(ds, rank) : ds_.From(row),
           .dx = dx_.data == nullptr ? dx_ : dx_.From(row),
           .sums = sums,
           .adds = row > begin},
          group, pass_.shape, memory);
    }
    if (sums == nullptr || learner.sums != nullptr) return;
    std::vector<PartSum> own;
    AddSums(group, sums, /*num_parts=*/1, learner.gradient, own);
    for (const PartSum& sum : own) Kernels().add_parts(sum);
  }

  const LoraPass& pass_;
  const LoraSite& site_;
  const Rows dy_, x_, dx_;
  const Rows ds_;  // Null if the caller does not want ds.
  std::vector<Rows> shrunk_;
  std::vector<RowChunk> chunks_;
  std::vector<size_t> learner_of_chunk_;
  std::vector<Learner> learners_;
  int64_t num_floats_ = 0;  // The size of a thread's memory.
  at::Tensor sums_S_;
};

}  // namespace

void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const LoraPass& pass, const LoraSite& site,
              const ShrunkInputs& shrunk, const LoraGradients& gradients,
              const at::Tensor& dx_TI) {
  BackwardPass(dy_TO, x_TI, pass, site, shrunk, dx_TI).Run(gradients);
}

at::Tensor AddGradients(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                        const LoraPass& pass, const LoraSite& site,
                        const ShrunkInputs& shrunk,
                        const LoraGradients& gradients) {
  int64_t rank = 0;
  for (const LoraSegment& segment : pass.routing) {
    rank = std::max<int64_t>(rank, GroupOf(segment, site).total_rank);
  }
  at::Tensor ds_TR = at::zeros({dy_TO.size(0), rank}, dy_TO.options());
  BackwardPass(dy_TO, x_TI, pass, site, shrunk, /*dx_TI=*/{}, ds_TR)
      .Run(gradients);
  return ds_TR;
}

}  // namespace weft::lora::cpu
