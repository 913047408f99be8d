// A problem of the lora bench: one linear layer whose rows belong to many
// adapters. Weft's kernels compute its products. cuBLAS computes the same
// results from stacked matrices and a mask.
//
// Legend: N rows, K inputs, M outputs, r the rank of an adapter, R the sum of
// the ranks of all adapters.
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
// cuBLAS is compared only up to this R, because its work grows with R.
inline constexpr int64_t kMaxStackedRank = 1024;

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
[[nodiscard]] const char* NameOf(LoraStep step);

// X, Y, dY and dX, each [N, K].
struct LoraActivations {
  Bf16Buffer x{kLoraRows * kLoraWidth}, y{kLoraRows * kLoraWidth};
  Bf16Buffer dy{kLoraRows * kLoraWidth}, dx{kLoraRows * kLoraWidth};
};

class LoraProblem {
 public:
  // Every adapter has the same number of rows. Adapter i has the rank ranks[i %
  // ranks.size()]. `device` and `activations` outlive the problem.
  LoraProblem(const Device& device, const LoraActivations& activations,
              int64_t num_adapters, const std::vector<int64_t>& ranks);

  void Run(LoraStep step) const;
  // Runs the step with cuBLAS, on stacked matrices and with a mask.
  // REQUIRES: HasPeer.
  void RunPeer(LoraStep step) const;
  [[nodiscard]] bool HasPeer() const { return peer_ != nullptr; }
  // Returns the peer's floating-point operations divided by those of Run. With
  // several adapters, the peer needs more, because it multiplies each row by
  // the matrices of every adapter.
  [[nodiscard]] double PeerFlopsRatio() const;
  // Runs all steps. Compares some elements of the results with loops in f64:
  // Weft's results and, if HasPeer, also the peer's. Call it only once: steps
  // add to old values, and larger values would widen the tolerance.
  void CheckResults() const;
  // Returns the number of bytes that the step has to read and write.
  [[nodiscard]] double NumBytes(LoraStep step) const;

 private:
  struct Adapter {
    int64_t rank = 0;
    int64_t offset = 0;  // Offset of A [r, K]. B [M, r] follows A.
    int64_t column = 0;  // The adapter's first column in the stacked S.
  };
  // The matrices A [R, K], B [M, R], S and dS [N, R] of all adapters side by
  // side, and the gradients dA and dB in the same order.
  struct Peer {
    Bf16Buffer a, b, s, ds;
    FloatBuffer da, db;
    Buffer<int32_t> adapter_R;
    FloatBuffer scale_R;
  };
  struct Matrices;
  [[nodiscard]] Matrices MatricesOf(int64_t adapter, bool of_peer) const;
  // One element of a step's result, and the terms of its sum.
  struct Element;
  [[nodiscard]] Element ElementOf(LoraStep step, int64_t adapter, int64_t place,
                                  bool of_peer) const;

  // Returns the number of elements of S. The number of elements in a row of S
  // is the rank of the row's adapter.
  [[nodiscard]] double NumShrunk() const;
  void MakeTable(const std::vector<int64_t>& ranks);
  void MakePeer();
  [[nodiscard]] LoraProduct Product(LoraStep step) const;
  void RunPeerShrink(LoraStep step) const;
  void CheckStep(LoraStep step, bool of_peer) const;

  const Device& device_;
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
  std::unique_ptr<Peer> peer_;
};

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_TESTS_BENCH_KERNELS_CUDA_LORA_PROBLEM_H_
