#include "src/executor/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace weft::executor {

std::vector<PlanGradient> GradientsOf(const TrainPlan& plan) {
  std::vector<PlanGradient> gradients;
  for (const lora::LoraSegment& segment : plan.batch.routing) {
    if (!segment.gradient_N.defined()) continue;
    if (std::ranges::find(gradients, segment.version, &PlanGradient::version) ==
        gradients.end()) {
      gradients.push_back({segment.version, segment.gradient_N});
    }
  }
  return gradients;
}

std::vector<PlanGradient> MakeGradients(TrainPlan& plan, at::Device device) {
  std::vector<PlanGradient> gradients = GradientsOf(plan);
  for (PlanGradient& own : gradients) {
    own.gradient_N =
        at::zeros({own.version->layout->num_parameters()},
                  at::TensorOptions().dtype(at::kFloat).device(device));
    for (lora::LoraRouting* routing :
         {&plan.batch.routing, &plan.rows.routing}) {
      for (lora::LoraSegment& segment : *routing) {
        if (segment.version == own.version && segment.gradient_N.defined()) {
          segment.gradient_N = own.gradient_N;
        }
      }
    }
  }
  return gradients;
}

}  // namespace weft::executor
