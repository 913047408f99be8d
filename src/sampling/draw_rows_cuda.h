// DrawRows on a device, in parts that a CUDA graph can and cannot capture. A
// build without CUDA does not have it (src/ops/cuda_dispatch.h).
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

// Writes the rules in that form to `places`, from which they are uploaded.
// Clears the remaining places. `places` has kRuleBytes for each.
void PutRules(const std::vector<DrawRule>& rules, std::span<std::byte> places);

// Returns the most filters that one of the rules has, 0 to 2. Launches depend
// on it.
[[nodiscard]] int MaxFilters(const std::vector<DrawRule>& rules);

// The outputs of a draw, on the device.
struct DrawSpace {
  at::Tensor results_2N;  // [2, N] i32: tokens, and bits of their logprobs.
  at::Tensor workspace;   // Bytes.
};
// Space for draws of up to that many filters.
[[nodiscard]] DrawSpace MakeDrawSpace(int64_t num_places, int64_t vocab,
                                      int max_filters, at::Device device);

// Draws for all N places. It neither allocates nor waits, and reads no host
// memory. So a graph may capture it and be replayed with other rules that do
// not have more filters. rules: N kRuleBytes on the device, aligned to 8 bytes;
// logits as in DrawRows.
void QueueDraw(const at::Tensor& logits_RV, const at::Tensor& rules,
               int max_filters, const DrawSpace& space);

// Returns the results of the first rules.size() places, which held these rules.
// With top_logprobs it also reads their logits. Waits.
[[nodiscard]] std::vector<std::optional<DrawResult>> FetchDraws(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules,
    const DrawSpace& space);

// Runs all parts: sampling::DrawRows for logits on a CUDA device.
[[nodiscard]] std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling::cuda

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
