// One linear layer whose rows belong to many adapters: our products, and the
// same as cuBLAS' products of stacked matrices with a mask.
//
// Legend: N rows, K inputs, M outputs, r the rank of an adapter, R the ranks of
// all adapters together.
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
// The largest R that has a peer: beyond it the masked zeros are most of it.
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
  // Every adapter has equally many rows. The adapters' ranks are `ranks`, again
  // and again.
  // Arguments: `device` and `activations` outlive it.
  LoraProblem(const Device& device, const LoraActivations& activations,
              int64_t num_adapters, const std::vector<int64_t>& ranks);

  void Run(LoraStep step) const;
  // The stacked and masked form, if HasPeer.
  void RunPeer(LoraStep step) const;
  [[nodiscard]] bool HasPeer() const { return peer_ != nullptr; }
  // Floating-point operations of the peer over those of Run: each row is
  // multiplied by every adapter's columns.
  [[nodiscard]] double PeerFlopsRatio() const;
  // Runs all steps and compares elements of each, and of the peer's, with loops
  // in f64. Once: steps add to what is there.
  void CheckResults() const;
  // What must move.
  [[nodiscard]] double NumBytes(LoraStep step) const;

 private:
  struct Adapter {
    int64_t rank = 0;
    int64_t offset = 0;  // Where its A [r, K] and, behind it, B [M, r] begin.
    int64_t column = 0;  // Where its ranks begin in the stacked matrices.
  };
  // A [R, K], B [M, R], S and dS [N, R] of all adapters beside each other.
  struct Peer {
    Bf16Buffer a, b, s, ds;
    FloatBuffer da, db;
    Buffer<int32_t> adapter_R;
    FloatBuffer scale_R;
  };
  // One element of a step's result, and what it is the sum of.
  struct Element;
  [[nodiscard]] Element ElementOf(LoraStep step, int64_t adapter, int64_t place,
                                  bool of_peer) const;

  // Elements of S without padding.
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
