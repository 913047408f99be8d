// Makes the pieces of a training step, and compares gradients.
#ifndef WEFT_TESTS_ENGINE_TRAIN_STEP_PIECES_H_
#define WEFT_TESTS_ENGINE_TRAIN_STEP_PIECES_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "src/engine/train/batch_packer.h"
#include "src/lora/adapter.h"

namespace weft::testing {

struct StepPieces {
  std::vector<engine::TrainPiece> pieces;
  lora::LoraGradients gradients;  // Zeros, in the adapters' compute dtype.
};

// Request i runs with adapter version i. The requests outlive the result.
inline StepPieces PiecesOf(
    const std::vector<TrainRequest>& requests,
    const std::vector<lora::AdapterVersionPtr>& versions) {
  StepPieces step;
  for (size_t i = 0; i < requests.size(); ++i) {
    step.pieces.push_back(
        {.request = &requests[i],
         .num_data = static_cast<int64_t>(requests[i].data.size()),
         .version = versions[i]});
    step.gradients.push_back(
        {.version = versions[i],
         .gradient_N = at::zeros_like(versions[i]->compute_N)});
  }
  return step;
}

// Checks that each gradient is not zero and differs from the expected one by at
// most `relative` times its norm.
inline void ExpectGradientsNear(const lora::LoraGradients& actual,
                                const lora::LoraGradients& expected,
                                double relative) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const at::Tensor a = actual[i].gradient_N.to(at::kDouble);
    const at::Tensor e = expected[i].gradient_N.to(at::kDouble);
    EXPECT_GT(e.norm().item<double>(), 0);
    EXPECT_LE((a - e).norm().item<double>(),
              relative * e.norm().item<double>());
  }
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_ENGINE_TRAIN_STEP_PIECES_H_
