#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/logit_edits.h"

namespace weft::kernels::cuda {
namespace {

// A list may have an entry for each token of a long prompt.
constexpr unsigned kThreads = 1024;

__device__ void Apply(const TokenEdit* edits, int32_t size, float* logits) {
  for (auto i = static_cast<int32_t>(threadIdx.x); i < size; i += kThreads) {
    const TokenEdit edit = edits[i];
    const float x = logits[edit.token] + edit.bias;
    // A fused multiplication and subtraction would have other bits.
    const float scaled =
        x > 0 ? x / edit.repetition : __fmul_rn(x, edit.repetition);
    logits[edit.token] = scaled - edit.penalty;
  }
}

__device__ void Ban(const uint32_t* banned, int64_t vocab, float* logits) {
  for (int64_t word = WarpIndex(); word * kWarp < vocab; word += NumWarps()) {
    const int64_t token = word * kWarp + Lane();
    if ((banned[word] >> Lane() & 1U) != 0 && token < vocab) {
      logits[token] = -INFINITY;
    }
  }
}

__global__ void __launch_bounds__(kThreads) EditLogitsKernel(LogitEdits edits) {
  const EditedRow row = edits.rows_N[blockIdx.x];
  float* const logits = edits.logits_RV + row.row * edits.vocab;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < row.num_updates;
       i += kThreads) {
    const EditUpdate update = edits.updates[row.first_update + i];
    row.own[update.place] = update.edit;
  }
  Apply(row.shared, row.num_shared, logits);
  // A token may be in both lists, and the updates are by other threads.
  __syncthreads();
  Apply(row.own, row.num_own, logits);
  __syncthreads();
  if (row.banned != nullptr) Ban(row.banned, edits.vocab, logits);
}

}  // namespace

cudaError_t EditLogits(const LogitEdits& edits, cudaStream_t stream) {
  if (edits.num_rows == 0) return cudaSuccess;
  return Launch(EditLogitsKernel, edits.num_rows, 1, kThreads, stream, edits);
}

}  // namespace weft::kernels::cuda
