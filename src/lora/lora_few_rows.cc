#include "src/lora/lora_few_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"

namespace weft::lora {
namespace {

using kernels::cpu::SkinnyProduct;

constexpr int64_t kMaxRows = 32;
// Weight elements of one task: enough to be worth a thread's turn.
constexpr int64_t kTaskElements = 8192;

struct Task {
  SkinnyProduct product;
  const float* weight_OI = nullptr;
};

// Products of one kind, cut into tasks that threads share evenly.
class TaskList {
 public:
  // All `outputs` of the product; its begin and end are set here.
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
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels::cpu::Kernels().skinny_product_f32(tasks_[i].product,
                                                   tasks_[i].weight_OI);
      }
    });
  }

 private:
  std::vector<Task> tasks_;
};

const GroupLayout& GroupOf(const LoraSegment& segment, const LoraSite& site) {
  return segment.version->layout->group(site.layer, site.group);
}

}  // namespace

bool HaveFewRows(const at::Tensor& x_TI, const LoraRouting& routing) {
  return ops::HasCpuKernel(x_TI) &&
         std::ranges::all_of(routing, [](const LoraSegment& segment) {
           return segment.end - segment.begin <= kMaxRows &&
                  ops::HasCpuKernel(segment.version->compute_N);
         });
}

void AddLoraFewRows(const at::Tensor& x_TI, const LoraRouting& routing,
                    const LoraSite& site, const ModelShape& shape,
                    at::Tensor& y_TO) {
  int64_t size = 0;
  for (const LoraSegment& segment : routing) {
    size += (segment.end - segment.begin) * GroupOf(segment, site).total_rank;
  }
  std::vector<float> shrunk(size);
  TaskList shrinks, expands;
  float* shrunk_nR = shrunk.data();
  for (const LoraSegment& segment : routing) {
    const GroupLayout& group = GroupOf(segment, site);
    if (group.factors.empty()) continue;
    const int64_t rows = segment.end - segment.begin;
    const auto* weights_N = segment.version->compute_N.const_data_ptr<float>();
    const LoraFactor& first = group.factors.front();
    shrinks.Add(
        {.x_BI = x_TI.const_data_ptr<float>() + segment.begin * first.in,
         .x_stride = first.in,
         .num_rows = rows,
         .num_inputs = first.in,
         .weight_stride = first.in,
         .y_BO = shrunk_nR,
         .y_stride = group.total_rank},
        group.total_rank, weights_N + first.a_offset);
    const float* column = shrunk_nR;
    for (const LoraFactor& factor : group.factors) {
      expands.Add({.x_BI = column,
                   .x_stride = group.total_rank,
                   .num_rows = rows,
                   .num_inputs = factor.rank,
                   .weight_stride = factor.rank,
                   .scale = static_cast<float>(factor.scale),
                   .adds = true,
                   .y_BO = y_TO.mutable_data_ptr<float>() +
                           segment.begin * y_TO.size(1) +
                           LoraSite::ColumnOf(factor.module, shape),
                   .y_stride = y_TO.size(1)},
                  factor.out, weights_N + factor.b_offset);
      column += factor.rank;
    }
    shrunk_nR += rows * group.total_rank;
  }
  shrinks.Run();
  expands.Run();
}

}  // namespace weft::lora
