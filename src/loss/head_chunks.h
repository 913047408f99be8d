// The logits of the head, one chunk after another in one buffer. Private to
// src/loss.
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

// Rows [begin, begin + count) and their entries.
struct HeadChunk {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first_entry = 0;
  int64_t num_entries = 0;
  ops::VocabRowsInput input;
  // The row of every entry, counted among all rows. Set with a softcap or with
  // several ranks.
  at::Tensor all_rows_E;
  at::Tensor logits_RV;
  // If defined, the softmax goes here instead of replacing the logits, and
  // scale_R is its scale (ops::VocabWeights).
  at::Tensor weights_RV;
  at::Tensor scale_R;

  // Returns the row of every entry, counted within the chunk.
  [[nodiscard]] at::Tensor RowsOfEntries() const { return all_rows_E - begin; }
  // Returns the softcap's derivative at the targets, [num_entries]. REQUIRES:
  // the logits are still raw.
  [[nodiscard]] at::Tensor TargetSlopes() const;
  // Writes softmax * D, with 0 at the rows' own targets. Returns it, still
  // without scale_R.
  const at::Tensor& SoftmaxBesideTargets(at::Tensor& logprobs_E,
                                         at::Tensor& entropies_R);
};

// Returns whether the softmax of these rows is written as bf16 weights, which a
// bf16 product reads directly. This is so on CUDA unless something needs the
// softmax in f32: LoRA of lm_head, gradient filters, or several ranks.
[[nodiscard]] bool TakesWeights(const at::Tensor& weight_VH,
                                const ScoreRows& rows,
                                const HeadOptions& options);

// Returns the row of every entry, [E].
[[nodiscard]] std::vector<int64_t> RowsOfEntries(const ScoreRows& rows);

// Score rows on the head's device.
struct DeviceRows {
  at::Tensor row_offsets;    // [R + 1] i64.
  at::Tensor targets_E;      // i64.
  at::Tensor rows_E;         // i64, as HeadChunk::all_rows_E.
  at::Tensor temperature_R;  // f32.
};

// Keeps references to its arguments.
class HeadChunks {
 public:
  HeadChunks(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
             const ScoreRows& rows, const HeadOptions& options);

  // From now on chunks have weights_RV and their part of this scale [R].
  void TakeWeights(const at::Tensor& scale_R);

  // Calls `visit` with the logits of rows [begin, end), one chunk at a time.
  // `shrunk_nR` is lora().Shrink(hidden).
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
