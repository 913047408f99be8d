// A problem of the lora bench: one linear layer whose rows belong to many
// adapters.
//
// Legend: N rows, K inputs, M outputs, r the rank of an adapter.
#ifndef WEFT_TESTS_BENCH_KERNELS_CUDA_LORA_PROBLEM_H_
#define WEFT_TESTS_BENCH_KERNELS_CUDA_LORA_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/lora/lora_gradient.h"
#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/lora/lora_table_builder.h"
#include "tests/bench/kernels_cuda/bench.h"

namespace weft::kernels::cuda::bench {

inline constexpr int64_t kLoraRows = 8192;   // N.
inline constexpr int64_t kLoraWidth = 4096;  // K and M.
inline constexpr float kLoraScale = 2;

enum class LoraStep {
  kShrink,          // S = X A^T.
  kExpand,          // Y += scale S B^T.
  kShrunkGradient,  // dS = scale dY B.
  kInputGradient,   // dX += dS A.
  kGradientOfA,     // dA += dS^T X.
  kGradientOfB      // dB += scale dY^T S.
};
inline constexpr LoraStep kLoraSteps[] = {
    LoraStep::kShrink,        LoraStep::kExpand,      LoraStep::kShrunkGradient,
    LoraStep::kInputGradient, LoraStep::kGradientOfA, LoraStep::kGradientOfB};
const char* NameOf(LoraStep step);

// X, Y, dY and dX, each [N, K].
struct LoraActivations {
  Bf16Buffer x{kLoraRows * kLoraWidth}, y{kLoraRows * kLoraWidth};
  Bf16Buffer dy{kLoraRows * kLoraWidth}, dx{kLoraRows * kLoraWidth};
};

class LoraProblem {
 public:
  // Every adapter has the same number of rows. Adapter i has the rank ranks[i %
  // ranks.size()]. `activations` outlives the problem.
  LoraProblem(const LoraActivations& activations, int64_t num_adapters,
              const std::vector<int64_t>& ranks);

  void Run(LoraStep step) const;
  // Runs all steps. Compares some elements of the results with loops in f64.
  // Call it only once: steps add to old values, and larger values would widen
  // the tolerance.
  void CheckResults() const;
  // Returns the number of bytes that the step has to read and write.
  double NumBytes(LoraStep step) const;

 private:
  struct Adapter {
    int64_t rank = 0;
    int64_t offset = 0;  // Offset of A [r, K]. B [M, r] follows A.
  };
  // One element of a step's result, and the terms of its sum.
  struct Element;
  Element ElementOf(LoraStep step, int64_t adapter, int64_t place) const;

  // Returns the number of elements of S. The number of elements in a row of S
  // is the rank of the row's adapter.
  double NumShrunk() const;
  void MakeTable(const std::vector<int64_t>& ranks);
  LoraProduct Product(LoraStep step) const;
  void CheckStep(LoraStep step) const;

  const LoraActivations& activations_;
  int64_t rows_each_;
  int64_t max_rank_ = 0;
  int64_t total_rank_ = 0;
  std::vector<Adapter> adapters_;
  std::unique_ptr<Bf16Buffer> weights_, s_, ds_;
  std::unique_ptr<FloatBuffer> gradients_, workspace_;
  std::unique_ptr<Buffer<std::byte>> table_bytes_;
  std::unique_ptr<Buffer<unsigned>> counters_;
  LoraTable table_;
};

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_TESTS_BENCH_KERNELS_CUDA_LORA_PROBLEM_H_
