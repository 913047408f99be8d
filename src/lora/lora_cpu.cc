#include "src/lora/lora_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/thread_team.h"

namespace weft::lora::cpu {
namespace {

// A segment is cut into the fewest chunks of at most this many rows. With
// smaller chunks, copying matrices and storing sums would take too much of the
// time. A segment of over 1024 rows has larger chunks, because kMaxChunks
// limits their number.
constexpr int64_t kChunkRows = 64;
// The largest number of chunks of a segment. It limits the memory for sums.
constexpr int64_t kMaxChunks = 16;

int64_t NumWorkers(size_t count) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return std::min<int64_t>(threads, static_cast<int64_t>(count));
}

// Calls work(worker, i) for all i < count. A free worker takes the next i, so
// each worker sees ascending values of i.
template <typename Work>
void RunWorkers(size_t count, const Work& work) {
  std::atomic<size_t> next = 0;
  at::parallel_for(0, NumWorkers(count), 1, [&](int64_t worker, int64_t) {
    for (size_t i = next++; i < count; i = next++) work(worker, i);
  });
}

using kernels::cpu::SkinnyProduct;

// The usual number of weight elements in a task. Much smaller tasks would not
// repay the cost of waking a thread.
constexpr int64_t kTaskElements = 8192;

struct Task {
  SkinnyProduct product;
  const float* weight_OI = nullptr;
};

// Products, cut by their outputs into tasks of about the same size.
class TaskList {
 public:
  // Adds one product, whose outputs are [0, outputs), as tasks.
  void Add(SkinnyProduct product, int64_t outputs, const float* weight_OI) {
    const int64_t inputs = std::max<int64_t>(1, product.num_inputs);
    const int64_t groups =
        kTaskElements / inputs / kernels::cpu::kSkinnyOutputs;
    const int64_t step =
        std::max<int64_t>(1, groups) * kernels::cpu::kSkinnyOutputs;
    for (int64_t begin = 0; begin < outputs; begin += step) {
      product.begin = begin;
      product.end = std::min(begin + step, outputs);
      tasks_.push_back({product, weight_OI});
    }
  }

  void Run() const {
    const auto count = static_cast<int64_t>(tasks_.size());
    ops::ParallelFor(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels::cpu::Kernels().skinny_product_f32(tasks_[i].product,
                                                   tasks_[i].weight_OI);
      }
    });
  }

 private:
  std::vector<Task> tasks_;
};

int64_t NumRows(const LoraSegment& segment) {
  return segment.end - segment.begin;
}

const float* WeightsOf(const LoraSegment& segment) {
  return segment.version->compute_N.const_data_ptr<float>();
}

using kernels::cpu::Kernels;
using kernels::cpu::PanelFloats;

// The largest number of rows of x A^T that are computed before these rows are
// multiplied by B.
constexpr int64_t kForwardBlockRows = 64;

// Returns the number of floats in a segment's panels: A^T [I, R], then every
// B^T [rank, out].
int64_t NumFloats(const GroupLayout& group) {
  int64_t floats = PanelFloats(group.factors.front().in, group.total_rank);
  for (const LoraFactor& factor : group.factors) {
    floats += PanelFloats(factor.rank, factor.out);
  }
  return floats;
}

void CopyForwardPanels(const LoraSegment& segment, const GroupLayout& group,
                       float* panels) {
  const auto* weights = segment.version->compute_N.const_data_ptr<float>();
  const auto add = [&](int64_t offset, int64_t terms, int64_t columns) {
    Kernels().copy_panels({.from_KN = weights + offset,
                           .k_stride = 1,
                           .n_stride = terms,
                           .num_terms = terms,
                           .num_columns = columns,
                           .panels = panels});
    panels += PanelFloats(terms, columns);
  };
  const LoraFactor& first = group.factors.front();
  add(first.a_offset, first.in, group.total_rank);
  for (const LoraFactor& factor : group.factors) {
    add(factor.b_offset, factor.rank, factor.out);
  }
}

// Writes x A^T of some rows to `shrunk`. If y is not null, also adds the
// products of x A^T and B to y.
void RunRows(const Rows& x, const GroupLayout& group,
             const model_config::ModelShape& shape, const float* panels,
             int64_t num_rows, const Rows& shrunk, const Rows& y) {
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
    CopyForwardPanels(routing[segment], GroupOf(routing[segment], site),
                      panels);
  };
  work.run = [&](size_t i, float* panels) {
    const auto& [segment, begin, end] = chunks[i];
    const GroupLayout& group = GroupOf(routing[segment], site);
    for (int64_t row = begin; row < end; row += kForwardBlockRows) {
      RunRows(x.From(row), group, pass.shape, panels,
              std::min(kForwardBlockRows, end - row),
              shrunk_rows[segment].From(row - routing[segment].begin),
              y.data == nullptr ? y : y.From(row));
    }
  };
  ForEachChunk(chunks, work);
}

// The next four functions compute the segments for which HasFewRows is true. S
// is the number of floats in x A^T of these segments. Their matrices [rows, R]
// are stored one after another.
int64_t NumShrunk(const LoraRouting& routing, const LoraSite& site) {
  int64_t size = 0;
  for (const LoraSegment& segment : routing) {
    if (!HasFewRows(segment)) continue;
    size += NumRows(segment) * GroupOf(segment, site).total_rank;
  }
  return size;
}

// Computes x A^T [S].
void ShrinkFewRows(const float* x_TI, const LoraRouting& routing,
                   const LoraSite& site, float* shrunk_S) {
  TaskList tasks;
  for (const LoraSegment& segment : routing) {
    const GroupLayout& group = GroupOf(segment, site);
    if (group.factors.empty() || !HasFewRows(segment)) continue;
    const LoraFactor& first = group.factors.front();
    tasks.Add({.x_BI = x_TI + segment.begin * first.in,
               .x_stride = first.in,
               .num_rows = NumRows(segment),
               .num_inputs = first.in,
               .weight_stride = first.in,
               .y_BO = shrunk_S,
               .y_stride = group.total_rank},
              group.total_rank, WeightsOf(segment) + first.a_offset);
    shrunk_S += NumRows(segment) * group.total_rank;
  }
  tasks.Run();
}

// Computes y += scale_a (x A_a^T) B_a^T.
void ExpandFewRows(const float* shrunk_S, const LoraRouting& routing,
                   const LoraSite& site, const model_config::ModelShape& shape,
                   const Rows& y_TO) {
  TaskList tasks;
  for (const LoraSegment& segment : routing) {
    if (!HasFewRows(segment)) continue;
    const GroupLayout& group = GroupOf(segment, site);
    int64_t column = 0;
    for (const LoraFactor& factor : group.factors) {
      const Rows y =
          y_TO.From(segment.begin, LoraSite::ColumnOf(factor.module, shape));
      tasks.Add({.x_BI = shrunk_S + column,
                 .x_stride = group.total_rank,
                 .num_rows = NumRows(segment),
                 .num_inputs = factor.rank,
                 .weight_stride = factor.rank,
                 .scale = static_cast<float>(factor.scale),
                 .adds = true,
                 .y_BO = y.data,
                 .y_stride = y.stride},
                factor.out, WeightsOf(segment) + factor.b_offset);
      column += factor.rank;
    }
    shrunk_S += NumRows(segment) * group.total_rank;
  }
  tasks.Run();
}

// Returns a view of `shrunk_S` for each segment, undefined for other segments
// and where the adapter does not adapt the site.
ShrunkInputs SplitShrunk(const at::Tensor& shrunk_S, const LoraRouting& routing,
                         const LoraSite& site) {
  ShrunkInputs result(routing.size());
  int64_t offset = 0;
  for (size_t i = 0; i < routing.size(); ++i) {
    const int64_t rank = GroupOf(routing[i], site).total_rank;
    if (rank == 0 || !HasFewRows(routing[i])) continue;
    const int64_t rows = NumRows(routing[i]);
    result[i] = shrunk_S.narrow(0, offset, rows * rank).view({rows, rank});
    offset += rows * rank;
  }
  return result;
}

}  // namespace

void AddChunks(const LoraRouting& routing, size_t segment,
               std::vector<RowChunk>& chunks) {
  const int64_t begin = routing[segment].begin;
  const int64_t rows = routing[segment].end - begin;
  const int64_t count =
      std::clamp<int64_t>((rows + kChunkRows - 1) / kChunkRows, 1, kMaxChunks);
  for (int64_t i = 0; i < count; ++i) {
    chunks.push_back({.segment = segment,
                      .begin = begin + rows * i / count,
                      .end = begin + rows * (i + 1) / count});
  }
}

void ForEachOf(size_t count, const std::function<void(size_t)>& work) {
  RunWorkers(count, [&work](int64_t, size_t i) { work(i); });
}

void ForEachChunk(const std::vector<RowChunk>& chunks, const ChunkWork& work) {
  struct Worker {
    size_t segment = SIZE_MAX;
    float* memory = nullptr;
  };
  std::vector<Worker> workers(NumWorkers(chunks.size()));
  const at::Tensor memory_WF =
      at::empty({static_cast<int64_t>(workers.size()), work.num_floats});
  for (size_t i = 0; i < workers.size(); ++i) {
    workers[i].memory =
        memory_WF.mutable_data_ptr<float>() + i * work.num_floats;
  }
  RunWorkers(chunks.size(), [&](int64_t index, size_t i) {
    Worker& worker = workers[index];
    if (worker.segment != chunks[i].segment) {
      worker.segment = chunks[i].segment;
      work.begin(worker.segment, worker.memory);
    }
    work.run(i, worker.memory);
  });
}

bool HasFewRows(const LoraSegment& segment) {
  return NumRows(segment) <= kernels::cpu::kSkinnyRows;
}

void AddFewRows(const float* x_TI, const LoraRouting& routing,
                const LoraSite& site, const model_config::ModelShape& shape,
                const Rows& y_TO) {
  const int64_t size = NumShrunk(routing, site);
  if (size == 0) return;
  const auto shrunk_S = std::make_unique_for_overwrite<float[]>(size);
  ShrinkFewRows(x_TI, routing, site, shrunk_S.get());
  ExpandFewRows(shrunk_S.get(), routing, site, shape, y_TO);
}

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
