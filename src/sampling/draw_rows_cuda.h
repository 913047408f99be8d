// DrawRows on a device, in parts: what can be captured in a CUDA graph and what
// cannot. Not there in a build without CUDA (src/ops/cuda_dispatch.h).
// Legend: N places for rules, R rows, V vocabulary.
#ifndef WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
#define WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "src/sampling/draw_rows.h"

namespace weft::sampling::cuda {

// Bytes of one rule in the form that the kernels read.
inline constexpr size_t kRuleBytes = 40;

// The rules in that form, at places in which they are uploaded; the places
// after them hold no rule. `places` has kRuleBytes for each.
void PutRules(const std::vector<DrawRule>& rules, std::span<std::byte> places);

// The most filters that one of the rules has, 0 to 2. It decides what is
// launched.
[[nodiscard]] int MaxFilters(const std::vector<DrawRule>& rules);

// What a draw writes, on the device.
struct DrawSpace {
  at::Tensor results_2N;  // [2, N] i32: tokens, and bits of their logprobs.
  at::Tensor workspace;   // Bytes.
};
// Space for draws of up to that many filters.
[[nodiscard]] DrawSpace MakeDrawSpace(int64_t num_places, int64_t vocab,
                                      int max_filters, at::Device device);

// Draws for all N places. It allocates nothing, waits for nothing and reads
// nothing of the host: a graph may hold it and be replayed with other rules,
// none of which has more filters. rules: N kRuleBytes on the device, aligned to
// 8 bytes; logits as those of DrawRows.
void QueueDraw(const at::Tensor& logits_RV, const at::Tensor& rules,
               int max_filters, const DrawSpace& space);

// The results of such a draw for its first rules.size() places, which held
// these rules; with top_logprobs it reads their logits too. Waits.
[[nodiscard]] std::vector<std::optional<DrawResult>> FetchDraws(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules,
    const DrawSpace& space);

// All of it in turn: sampling::DrawRows for logits on a CUDA device.
[[nodiscard]] std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling::cuda

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
