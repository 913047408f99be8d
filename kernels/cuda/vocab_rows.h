// Row statistics over the vocabulary for the fused head.
// Legend: R rows, V vocabulary, E score entries (row, target).
#ifndef WEFT_KERNELS_CUDA_VOCAB_ROWS_H_
#define WEFT_KERNELS_CUDA_VOCAB_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

// The output of the softmax.
enum class VocabSoftmax {
  kNone,
  // Replaces the logits, which are read twice.
  kInPlace,
  // Is written as bf16 weights beside the logits, which are read once: a row's
  // weights times its scale are its softmax.
  kWeights,
};

// One chunk of logits. Row r owns the entries [row_offsets[r], row_offsets[r +
// 1]), counted from row_offsets[0]. All pointers are device pointers.
struct VocabRows {
  int64_t num_rows = 0;                  // R.
  int64_t vocab = 0;                     // V.
  float* logits_RV = nullptr;            // Contiguous.
  const int64_t* row_offsets = nullptr;  // [R + 1].
  const int64_t* targets_E = nullptr;    // Each in [0, V).
  const float* temperature_R = nullptr;  // > 0.
  float softcap = 0;  // > 0: a logit x becomes softcap * tanh(x / softcap).
  VocabSoftmax softmax = VocabSoftmax::kNone;
  void* weights_RV = nullptr;  // Contiguous; with kWeights, as scale_R.
  float* scale_R = nullptr;
  bool clear_targets = false;  // The softmax is 0 at a row's own targets.
  float* logprobs_E = nullptr;
  float* entropy_R = nullptr;  // Null: not asked for.
};

// z = softcap(x) / temperature; logprobs[e] = z[row, target] - logsumexp(z),
// the entropy of softmax(z) in nats, and, if asked for, softmax(z) *
// softcap'(x). Logits of -inf have probability 0; a NaN makes all results of
// its row NaN and no other's (of weights and scale their product).
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  reference::ScoreVocabRow; online softmax, Milakov and Gimelshein
//          2018.
[[nodiscard]] cudaError_t ScoreVocabRows(const VocabRows& rows,
                                         cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_VOCAB_ROWS_H_
