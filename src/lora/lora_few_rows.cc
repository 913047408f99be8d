#include "src/lora/lora_few_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/thread_team.h"

namespace weft::lora {
namespace {

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

}  // namespace

bool HasFewRows(const LoraSegment& segment) {
  return NumRows(segment) <= kernels::cpu::kSkinnyRows;
}

int64_t NumShrunk(const LoraRouting& routing, const LoraSite& site) {
  int64_t size = 0;
  for (const LoraSegment& segment : routing) {
    if (!HasFewRows(segment)) continue;
    size += NumRows(segment) * GroupOf(segment, site).total_rank;
  }
  return size;
}

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

void ExpandFewRows(const float* shrunk_S, const LoraRouting& routing,
                   const LoraSite& site, const ModelShape& shape,
                   const cpu::Rows& y_TO) {
  TaskList tasks;
  for (const LoraSegment& segment : routing) {
    if (!HasFewRows(segment)) continue;
    const GroupLayout& group = GroupOf(segment, site);
    int64_t column = 0;
    for (const LoraFactor& factor : group.factors) {
      const cpu::Rows y =
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

void AddFewRows(const float* x_TI, const LoraRouting& routing,
                const LoraSite& site, const ModelShape& shape,
                const cpu::Rows& y_TO) {
  const int64_t size = NumShrunk(routing, site);
  if (size == 0) return;
  const auto shrunk_S = std::make_unique_for_overwrite<float[]>(size);
  ShrinkFewRows(x_TI, routing, site, shrunk_S.get());
  ExpandFewRows(shrunk_S.get(), routing, site, shape, y_TO);
}

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

}  // namespace weft::lora
