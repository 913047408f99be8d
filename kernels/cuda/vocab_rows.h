// Log-probabilities, entropy and softmax of rows of logits, for the fused
// output head.
// Legend: R rows, V vocabulary, E score entries (row, target).
#ifndef WEFT_KERNELS_CUDA_VOCAB_ROWS_H_
#define WEFT_KERNELS_CUDA_VOCAB_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

// Where the softmax is written.
enum class VocabSoftmax {
  kNone,
  // The softmax replaces the logits, which are read twice.
  kInPlace,
  // weights_RV gets unnormalised weights in bf16, and scale_R gets one factor
  // for each row. The softmax is their product. The logits stay unchanged, and
  // are usually read once.
  kWeights,
};

// A chunk of rows of logits. With first = row_offsets[0], row r owns the
// entries [row_offsets[r] - first, row_offsets[r + 1] - first). All pointers
// are device pointers.
struct VocabRows {
  int64_t num_rows = 0;                  // R.
  int64_t vocab = 0;                     // V.
  float* logits_RV = nullptr;            // Contiguous.
  const int64_t* row_offsets = nullptr;  // [R + 1].
  const int64_t* targets_E = nullptr;    // Each in [0, V).
  const float* temperature_R = nullptr;  // > 0.
  float softcap = 0;  // If > 0, x becomes softcap * tanh(x / softcap).
  VocabSoftmax softmax = VocabSoftmax::kNone;
  void* weights_RV = nullptr;  // bf16, contiguous; only for kWeights.
  float* scale_R = nullptr;    // Only for kWeights.
  bool clear_targets = false;  // Writes 0 for the softmax at targets.
  float* logprobs_E = nullptr;
  float* entropy_R = nullptr;  // Null if the entropy is not wanted.
};

// With z = softcap(x) / temperature, computes logprobs[e] = z[row, target] -
// logsumexp(z), the entropy of softmax(z) in nats and, if wanted, softmax(z) *
// softcap'(x). Without softcap, a logit of -inf has probability 0, unless the
// whole row is -inf. A NaN makes all results of its row NaN, except that
// kInPlace writes 0 at cleared targets. With kWeights, the scale of the row is
// NaN, so the products of weights and scale are NaN, even if some weights are
// finite. The results of other rows do not change.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  reference::ScoreVocabRow; online softmax, Milakov and Gimelshein
//          2018.
[[nodiscard]] cudaError_t ScoreVocabRows(const VocabRows& rows,
                                         cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_VOCAB_ROWS_H_
