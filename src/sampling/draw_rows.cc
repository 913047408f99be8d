#include "src/sampling/draw_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "absl/types/span.h"
#include "src/ops/cuda_dispatch.h"
#include "src/sampling/draw_rows_cuda.h"

namespace weft::sampling {
std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules) {
  TORCH_CHECK(logits_RV.dim() == 2 && logits_RV.is_contiguous() &&
                  logits_RV.scalar_type() == at::kFloat,
              "tokens are drawn from contiguous rows of f32, got ",
              logits_RV.scalar_type(), " ", logits_RV.sizes());
  const auto num_rows = static_cast<int64_t>(rules.size());
  TORCH_CHECK(logits_RV.size(0) == num_rows, "there are ", num_rows,
              " rules to draw from ", logits_RV.size(0), " rows");
  if constexpr (ops::kHasCudaKernels) {
    if (logits_RV.is_cuda()) return cuda::DrawRows(logits_RV, rules);
  }
  std::vector<std::optional<DrawResult>> drawn(rules.size());
  const float* logits = logits_RV.const_data_ptr<float>();
  const int64_t vocab = logits_RV.size(1);
  at::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const DrawRule& rule = rules[r];
      drawn[r] = DrawToken(
          absl::MakeConstSpan(logits + r * vocab, vocab), rule.config,
          CounterUniform(rule.seed, rule.sample_index, rule.position));
    }
  });
  return drawn;
}

}  // namespace weft::sampling
