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
  for (const DrawRule& rule : rules) {
    TORCH_CHECK(rule.row >= 0 && rule.row < logits_RV.size(0),
                "a rule draws from row ", rule.row, ", there are ",
                logits_RV.size(0));
  }
  if constexpr (ops::kHasCudaKernels) {
    if (logits_RV.is_cuda()) return cuda::DrawRows(logits_RV, rules);
  }
  std::vector<std::optional<DrawResult>> drawn(rules.size());
  const float* logits = logits_RV.const_data_ptr<float>();
  const int64_t vocab = logits_RV.size(1);
  const auto num_rules = static_cast<int64_t>(rules.size());
  at::parallel_for(0, num_rules, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const DrawRule& rule = rules[i];
      drawn[i] = DrawToken(
          absl::MakeConstSpan(logits + rule.row * vocab, vocab), rule.config,
          CounterUniform(rule.seed, rule.sample_index, rule.position));
    }
  });
  return drawn;
}

}  // namespace weft::sampling
