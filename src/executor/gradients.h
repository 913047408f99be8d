// The gradients that a plan leaves on a rank.
#ifndef WEFT_SRC_EXECUTOR_GRADIENTS_H_
#define WEFT_SRC_EXECUTOR_GRADIENTS_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/executor/plan.h"

namespace weft::executor {

// Weights that a plan trains, in the order of its first segments, which is the
// same on every rank, and where their gradient is added up.
struct PlanGradient {
  lora::AdapterVersionPtr version;
  at::Tensor gradient_N;
};
[[nodiscard]] std::vector<PlanGradient> GradientsOf(const TrainPlan& plan);

// Gives the plan zeros of its versions' own sizes to add its gradients to;
// returns what GradientsOf gives then.
std::vector<PlanGradient> MakeGradients(TrainPlan& plan, at::Device device);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_GRADIENTS_H_
