// DrawRows on CUDA, divided into parts that a CUDA graph can capture and parts
// that it cannot. A build without CUDA does not have these functions
// (src/ops/cuda_dispatch.h).
//
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

// Bytes of one rule in the format that the kernels read.
inline constexpr size_t kRuleBytes = 40;

// Writes the rules in that format to `places`, which is then uploaded. Clears
// the remaining places. Each place has kRuleBytes.
void PutRules(const std::vector<DrawRule>& rules, std::span<std::byte> places);

// Returns the largest number of filters that a rule has, 0 to 2. The launches
// of a draw depend on it.
[[nodiscard]] int MaxFilters(const std::vector<DrawRule>& rules);

// The outputs of a draw, on the device.
struct DrawSpace {
  at::Tensor results_2N;  // [2, N] i32: tokens, then the bits of logprobs.
  at::Tensor workspace;   // Bytes.
};
// Allocates space for draws with up to `max_filters` filters.
[[nodiscard]] DrawSpace MakeDrawSpace(int64_t num_places, int64_t vocab,
                                      int max_filters, at::Device device);

// Draws for all N places. Neither allocates nor waits, and reads no host
// memory. So a graph may capture it and replay it with other rules, as long as
// they have no more filters. Shapes: rules N * kRuleBytes bytes on the device,
// aligned to 8; logits as in DrawRows.
void QueueDraw(const at::Tensor& logits_RV, const at::Tensor& rules,
               int max_filters, const DrawSpace& space);

// Returns the results of the first rules.size() places, which held these rules.
// For rules with top_logprobs, also reads their logits. Waits for the device.
[[nodiscard]] std::vector<std::optional<DrawResult>> FetchDraws(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules,
    const DrawSpace& space);

// sampling::DrawRows for logits on a CUDA device: runs all parts.
[[nodiscard]] std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling::cuda

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
