// DrawRows on CUDA, divided into functions that a CUDA graph can capture and
// functions that it cannot capture. A build without CUDA does not have these
// functions (src/ops/cuda_dispatch.h).
//
// Legend: N places of rules, R rows, V vocabulary.
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

// The size of one rule in the format that the kernels read.
inline constexpr size_t kRuleBytes = 40;

// Writes the rules in the kernels' format to the first places of `places`,
// which the caller then uploads. Each place has kRuleBytes. Places without a
// rule draw nothing. Throws c10::Error if there are more rules than places.
void PutRules(const std::vector<DrawRule>& rules, std::span<std::byte> places);

// Returns the largest number of filters (top_k, top_p) of any rule, 0 to 2, and
// at least 1 if a rule has min_p. The number of launches of a draw depends on
// it.
int MaxFilters(const std::vector<DrawRule>& rules);

// The memory of a draw on the device: its results and its workspace.
struct DrawSpace {
  at::Tensor results_2N;  // [2, N] i32: tokens, then the bits of logprobs.
  at::Tensor workspace;   // u8, scratch memory of the kernels.
};
// Allocates memory for draws with up to `max_filters` filters.
DrawSpace MakeDrawSpace(int64_t num_places, int64_t vocab, int max_filters,
                        at::Device device);

// Queues a draw for all N places. Does not allocate, does not wait and reads no
// host memory. So a graph may capture the draw and replay it with other rules
// of at most `max_filters` filters.
// Shapes: rules N * kRuleBytes bytes on the device, aligned to 8; logits as in
// DrawRows.
void QueueDraw(const at::Tensor& logits_RV, const at::Tensor& rules,
               int max_filters, const DrawSpace& space);

// Returns the results of QueueDraw for `rules`, which were in the first places.
// For rules with lists (DrawConfig), copies their logits and draws on the host.
// If no rule has lists, logits_RV may be undefined. Waits for the device.
std::vector<std::optional<DrawResult>> FetchDraws(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules,
    const DrawSpace& space);

// Does what sampling::DrawRows does, for logits on a CUDA device.
std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling::cuda

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
