#include "src/lora/lora_cpu.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/thread_team.h"

namespace weft::lora::cpu {
namespace {

// A segment is cut into the fewest chunks of at most this many rows. With
// smaller chunks, copying matrices would take too much of the time.
constexpr int64_t kChunkRows = 128;

using kernels::cpu::Kernels;
using kernels::cpu::PanelFloats;
using kernels::cpu::RowProduct;

// The usual number of weight elements in a task of few rows. Much smaller tasks
// would not repay the cost of waking a thread.
constexpr int64_t kTaskElements = 8192;

// The columns of y in a task of the expansion. The number is a multiple of the
// columns of every kernel's panel.
constexpr int64_t kSliceColumns = 96;
// The most rows of y in such a task. Packing the slice of B takes a small part
// of the time of so many rows.
constexpr int64_t kSliceRows = 256;

int64_t NumRows(const LoraSegment& segment) {
  return segment.end - segment.begin;
}

const float* WeightsOf(const LoraSegment& segment) {
  return segment.version->compute_N.const_data_ptr<float>();
}

// The products of a batch's segments, cut into tasks of about the same size. S
// is the number of floats in x A^T of all segments. Their matrices [rows, R]
// are stored one after another.
class Shrink {
 public:
  Shrink(const float* x_TI, const LoraRouting& routing, const LoraSite& site,
         float* shrunk_S) {
    for (const LoraSegment& segment : routing) {
      const GroupLayout& group = GroupOf(segment, site);
      if (group.factors.empty()) continue;
      const LoraFactor& first = group.factors.front();
      Add({.x_BI = x_TI + segment.begin * first.in,
           .x_stride = first.in,
           .num_rows = NumRows(segment),
           .num_inputs = first.in,
           .weight_stride = first.in,
           .y_BO = shrunk_S,
           .y_stride = group.total_rank,
           .end = group.total_rank},
          WeightsOf(segment) + first.a_offset, group);
      shrunk_S += NumRows(segment) * group.total_rank;
    }
  }

  void Run() const {
    ops::ParallelFor(std::ssize(tasks_), 1, [&](int64_t begin, int64_t end) {
      float* const memory =
          has_many_rows_ ? ops::ThreadMemory(kernels::cpu::kRowProductFloats)
                         : nullptr;
      for (int64_t i = begin; i < end; ++i) RunTask(tasks_[i], memory);
    });
  }

 private:
  struct Task {
    RowProduct product;
    const float* weight_OI = nullptr;
    const GroupLayout* group = nullptr;
  };

  // Cuts few rows by their outputs, and many by their rows.
  void Add(RowProduct product, const float* weight_OI,
           const GroupLayout& group) {
    const int64_t rows = product.num_rows, outputs = product.end;
    int64_t row_step = rows, output_step = outputs;
    if (rows > kernels::cpu::kFewRows) {
      has_many_rows_ = true;
      row_step = kernels::cpu::kRowBlock;
    } else {
      const int64_t inputs = std::max<int64_t>(1, product.num_inputs);
      const int64_t groups = kTaskElements / inputs / kernels::cpu::kRowOutputs;
      output_step = std::max<int64_t>(1, groups) * kernels::cpu::kRowOutputs;
    }
    for (int64_t row = 0; row < rows; row += row_step) {
      product.num_rows = std::min(row_step, rows - row);
      for (int64_t output = 0; output < outputs; output += output_step) {
        product.begin = output;
        product.end = std::min(output + output_step, outputs);
        tasks_.push_back({product, weight_OI, &group});
      }
      product.x_BI += row_step * product.x_stride;
      product.y_BO += row_step * product.y_stride;
    }
  }

  static void RunTask(const Task& task, float* memory) {
    RowProduct product = task.product;
    product.memory = memory;
    Kernels().row_product_f32(product, task.weight_OI);
    int64_t column = 0;
    for (const LoraFactor& factor : task.group->factors) {
      const int64_t begin = std::max(product.begin, column);
      column += factor.rank;
      const int64_t end = std::min(product.end, column);
      if (begin >= end) continue;
      ScaleColumns({product.y_BO + begin, product.y_stride}, product.num_rows,
                   end - begin, factor.scale);
    }
  }

  std::vector<Task> tasks_;
  bool has_many_rows_ = false;
};

// The terms y += s B^T of a batch's segments, where s is scale x A^T. Each task
// packs a slice of a B^T, and multiplies rows with it.
class Expansion {
 public:
  Expansion(float* shrunk_S, const LoraRouting& routing, const LoraSite& site,
            const model_config::ModelShape& shape, const Rows& y_TO) {
    for (const LoraSegment& segment : routing) {
      const GroupLayout& group = GroupOf(segment, site);
      int64_t column = 0;
      for (const LoraFactor& factor : group.factors) {
        Add({.shrunk = Rows(shrunk_S + column, group.total_rank),
             .y = y_TO.From(segment.begin,
                            LoraSite::ColumnOf(factor.module, shape)),
             .num_rows = NumRows(segment),
             .b = WeightsOf(segment) + factor.b_offset,
             .rank = factor.rank,
             .columns = factor.out});
        column += factor.rank;
      }
      shrunk_S += NumRows(segment) * group.total_rank;
    }
  }

  void Run() const {
    ops::ParallelFor(std::ssize(tasks_), 1, [&](int64_t begin, int64_t end) {
      float* const panels = ops::ThreadMemory(panel_floats_);
      for (int64_t i = begin; i < end; ++i) RunTask(tasks_[i], panels);
    });
  }

 private:
  struct Task {
    Rows shrunk, y;
    int64_t num_rows;
    const float* b;  // Rows [rank], one for each column.
    int64_t rank;
    int64_t columns;
  };

  void Add(const Task& all) {
    panel_floats_ =
        std::max(panel_floats_, PanelFloats(all.rank, kSliceColumns));
    for (int64_t column = 0; column < all.columns; column += kSliceColumns) {
      for (int64_t row = 0; row < all.num_rows; row += kSliceRows) {
        tasks_.push_back(
            {.shrunk = all.shrunk.From(row),
             .y = all.y.From(row, column),
             .num_rows = std::min(kSliceRows, all.num_rows - row),
             .b = all.b + column * all.rank,
             .rank = all.rank,
             .columns = std::min(kSliceColumns, all.columns - column)});
      }
    }
  }

  static void RunTask(const Task& task, float* panels) {
    Kernels().copy_panels({.from_KN = task.b,
                           .k_stride = 1,
                           .n_stride = task.rank,
                           .num_terms = task.rank,
                           .num_columns = task.columns,
                           .panels = panels});
    AddExpansion(task.shrunk, task.rank, panels, task.num_rows, task.y,
                 task.columns);
  }

  std::vector<Task> tasks_;
  int64_t panel_floats_ = 0;
};

int64_t NumShrunk(const LoraRouting& routing, const LoraSite& site) {
  int64_t size = 0;
  for (const LoraSegment& segment : routing) {
    size += NumRows(segment) * GroupOf(segment, site).total_rank;
  }
  return size;
}

// Returns a view of `shrunk_S` for each segment, undefined where the adapter
// does not adapt the site.
ShrunkInputs SplitShrunk(const at::Tensor& shrunk_S, const LoraRouting& routing,
                         const LoraSite& site) {
  ShrunkInputs result(routing.size());
  int64_t offset = 0;
  for (size_t i = 0; i < routing.size(); ++i) {
    const int64_t rank = GroupOf(routing[i], site).total_rank;
    if (rank == 0) continue;
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
  const int64_t count = std::max<int64_t>(1, ops::CeilDiv(rows, kChunkRows));
  for (int64_t i = 0; i < count; ++i) {
    chunks.push_back({.segment = segment,
                      .begin = begin + rows * i / count,
                      .end = begin + rows * (i + 1) / count});
  }
}

void ForEachChunk(const std::vector<RowChunk>& chunks, const ChunkWork& work) {
  struct Worker {
    size_t segment = SIZE_MAX;
    float* memory = nullptr;
  };
  std::vector<Worker> workers(ops::NumWorkers(std::ssize(chunks)));
  const at::Tensor memory_WF =
      at::empty({static_cast<int64_t>(workers.size()), work.num_floats});
  for (size_t i = 0; i < workers.size(); ++i) {
    workers[i].memory =
        memory_WF.mutable_data_ptr<float>() + i * work.num_floats;
  }
  ops::ForEachTask(std::ssize(chunks), [&](int64_t index, int64_t i) {
    Worker& worker = workers[index];
    if (worker.segment != chunks[i].segment) {
      worker.segment = chunks[i].segment;
      work.begin(worker.segment, worker.memory);
    }
    work.run(i, worker.memory);
  });
}

void ScaleColumns(const Rows& rows, int64_t num_rows, int64_t columns,
                  double scale) {
  if (scale == 1) return;
  const auto factor = static_cast<float>(scale);
  for (int64_t row = 0; row < num_rows; ++row) {
    float* const x = rows.From(row).data;
    for (int64_t i = 0; i < columns; ++i) x[i] *= factor;
  }
}

void Add(const float* x_TI, const LoraRouting& routing, const LoraSite& site,
         const model_config::ModelShape& shape, const Rows& y_TO) {
  const int64_t size = NumShrunk(routing, site);
  if (size == 0) return;
  const auto shrunk_S = std::make_unique_for_overwrite<float[]>(size);
  Shrink(x_TI, routing, site, shrunk_S.get()).Run();
  Expansion(shrunk_S.get(), routing, site, shape, y_TO).Run();
}

ShrunkInputs Forward(const at::Tensor& x_TI, const LoraPass& pass,
                     const LoraSite& site, const at::Tensor& y_TO) {
  const int64_t size = NumShrunk(pass.routing, site);
  if (size == 0) return ShrunkInputs(pass.routing.size());
  const at::Tensor shrunk_S = at::empty({size}, x_TI.options());
  auto* shrunk = shrunk_S.mutable_data_ptr<float>();
  Shrink(x_TI.const_data_ptr<float>(), pass.routing, site, shrunk).Run();
  if (y_TO.defined()) {
    Expansion(shrunk, pass.routing, site, pass.shape, Rows(y_TO)).Run();
  }
  return SplitShrunk(shrunk_S, pass.routing, site);
}

}  // namespace weft::lora::cpu
