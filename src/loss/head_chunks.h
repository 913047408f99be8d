// Computes the head's logits in chunks of rows, which share one buffer. Private
// to src/loss.
//
// Legend: R score rows, E score entries, H hidden, V vocabulary.
#ifndef WEFT_SRC_LOSS_HEAD_CHUNKS_H_
#define WEFT_SRC_LOSS_HEAD_CHUNKS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "src/loss/fused_head.h"
#include "src/loss/head_lora.h"
#include "src/ops/vocab_rows.h"

namespace weft::loss {

// The logits of rows [begin, begin + count), and the rows' entries.
struct HeadChunk {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first_entry = 0;
  int64_t num_entries = 0;
  ops::VocabRowsInput input;
  // The row of every entry, counted among all rows. Defined if there is a
  // softcap or several ranks.
  at::Tensor all_rows_E;
  at::Tensor logits_RV;
  // If weights_RV is defined, the softmax is written to weights_RV, and the
  // logits are kept. scale_R is then the scale of the rows of weights_RV
  // (ops::VocabWeights).
  at::Tensor weights_RV;
  at::Tensor scale_R;

  // Returns the row of every entry, counted within the chunk. REQUIRES:
  // all_rows_E is defined.
  [[nodiscard]] at::Tensor RowsOfEntries() const { return all_rows_E - begin; }
  // Returns the softcap's derivative D at the targets, [num_entries]. REQUIRES:
  // there is a softcap, and the softmax has not overwritten the logits yet.
  [[nodiscard]] at::Tensor TargetSlopes() const;
  // Sets the log-probabilities and, if entropies_R is defined, the entropies.
  // Replaces the logits by softmax * D, with 0 at each row's own targets, and
  // returns the result. If weights_RV is defined, writes the result to
  // weights_RV instead, without the factor scale_R.
  const at::Tensor& SoftmaxBesideTargets(at::Tensor& logprobs_E,
                                         at::Tensor& entropies_R);
};

// Returns whether the softmax of these rows is written as bf16 weights, which a
// bf16 product reads directly. This is so on CUDA with a bf16 head, unless LoRA
// of lm_head, gradient filters or several ranks need the softmax in f32.
[[nodiscard]] bool TakesWeights(const at::Tensor& weight_VH,
                                const ScoreRows& rows,
                                const HeadOptions& options);

// Returns the row of every entry, [E].
[[nodiscard]] std::vector<int64_t> RowsOfEntries(const ScoreRows& rows);

// The arrays of ScoreRows, on the head's device.
struct DeviceRows {
  at::Tensor row_offsets;    // [R + 1] i64.
  at::Tensor targets_E;      // i64.
  at::Tensor rows_E;         // i64, as HeadChunk::all_rows_E.
  at::Tensor temperature_R;  // f32.
};

// Computes the logits of score rows, one chunk after another. hidden_RH,
// weight_VH and `rows` outlive the object.
class HeadChunks {
 public:
  HeadChunks(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
             const ScoreRows& rows, const HeadOptions& options);

  // Makes ForEach set weights_RV and scale_R of every chunk. A chunk's scale_R
  // is a view of `scale_R` [R].
  void TakeWeights(const at::Tensor& scale_R);

  // Calls `visit` for the rows [begin, end), one chunk after another. The
  // chunk's logits_RV has the logits before the softcap. `shrunk_nR` is
  // lora().Shrink(hidden).
  void ForEach(int64_t begin, int64_t end,
               const std::vector<at::Tensor>& shrunk_nR,
               const std::function<void(HeadChunk&)>& visit) const;

  [[nodiscard]] const HeadLora& lora() const { return lora_; }

 private:
  const at::Tensor& hidden_RH_;
  const at::Tensor& weight_VH_;
  const ScoreRows& rows_;
  const DeviceRows device_rows_;
  const double softcap_;
  const HeadLora lora_;
  const int64_t chunk_;
  const at::Tensor buffer_;
  at::Tensor weights_;
  at::Tensor scale_R_;
};

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_CHUNKS_H_
