// One linear layer whose rows belong to many adapters: Weft's products, and the
// same results by cuBLAS from stacked matrices and a mask.
//
// Legend: N rows, K inputs, M outputs, r the rank of an adapter, R the sum of
// the ranks of all adapters.
#ifndef WEFT_KERNELS_CUDA_BENCH_LORA_PROBLEM_H_
#define WEFT_KERNELS_CUDA_BENCH_LORA_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/bench/bench.h"
#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_product.h"
#include "kernels/cuda/lora_table_builder.h"

namespace weft::kernels::cuda::bench {

inline constexpr int64_t kLoraRows = 8192;   // N.
inline constexpr int64_t kLoraWidth = 4096;  // K and M.
inline constexpr float kLoraScale = 2;
// The largest R for which cuBLAS is compared. Beyond it most of its work is
// masked zeros.
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

// X, Y, dY and dX.
struct LoraActivations {
  Bf16Buffer x{kLoraRows * kLoraWidth}, y{kLoraRows * kLoraWidth};
  Bf16Buffer dy{kLoraRows * kLoraWidth}, dx{kLoraRows * kLoraWidth};
};

class LoraProblem {
 public:
  // Every adapter has the same number of rows. The adapters' ranks repeat
  // `ranks`. `device` and `activations` outlive the problem.
  LoraProblem(const Device& device, const LoraActivations& activations,
              int64_t num_adapters, const std::vector<int64_t>& ranks);

  void Run(LoraStep step) const;
  // Runs the stacked and masked form. REQUIRES: HasPeer.
  void RunPeer(LoraStep step) const;
  [[nodiscard]] bool HasPeer() const { return peer_ != nullptr; }
  // Returns the floating-point operations of the peer divided by those of Run.
  // The peer multiplies each row by every adapter's columns.
  [[nodiscard]] double PeerFlopsRatio() const;
  // Runs all steps and compares elements of each, and of the peer's, with loops
  // in f64. Call it once, because steps add to old values.
  void CheckResults() const;
  // Returns the bytes that must move.
  [[nodiscard]] double NumBytes(LoraStep step) const;

 private:
  struct Adapter {
    int64_t rank = 0;
    int64_t offset = 0;  // Offset of A [r, K]. B [M, r] follows A.
    int64_t column = 0;  // First column of the adapter's ranks when all
                         // adapters are stacked.
  };
  // A [R, K], B [M, R], S and dS [N, R] of all adapters side by side.
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

  // Returns the number of elements of S without padding.
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

#endif  // WEFT_KERNELS_CUDA_BENCH_LORA_PROBLEM_H_
