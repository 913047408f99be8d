#include "src/ops/vocab_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>

#include "kernels/cpu/kernels.h"
#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::ops {
namespace {

// VocabRowsReference scores about this many logits at a time, so that its
// temporaries stay small.
constexpr int64_t kReferenceBlockElements = int64_t{1} << 24;

// Holds z = softcap(x) / temperature, and tanh(x / softcap) if there is a
// softcap.
struct Scaled {
  at::Tensor z;
  at::Tensor tanh;
};

Scaled Scale(const at::Tensor& x, double softcap,
             const at::Tensor& temperature) {
  if (softcap <= 0) return {x / temperature, {}};
  at::Tensor tanh = (x / softcap).tanh_();
  return {tanh * softcap / temperature, tanh};
}

// Computes the log-sum-exp of rows [begin, begin + count). Also writes their
// entropy if entropy_R is defined, and their softmax if `softmax_in_place`.
void ScoreBlock(at::Tensor& logits_RV, const VocabRowsInput& input,
                int64_t begin, int64_t count, bool softmax_in_place,
                at::Tensor& lse_R, at::Tensor& entropy_R) {
  at::Tensor rows = logits_RV.narrow(0, begin, count);
  const at::Tensor temperature =
      input.temperature_R.narrow(0, begin, count).to(rows.dtype());
  const Scaled scaled = Scale(rows, input.softcap, temperature.unsqueeze(1));
  const at::Tensor lse = scaled.z.logsumexp(1, true);
  lse_R.narrow(0, begin, count).copy_(lse.squeeze(1));
  if (!softmax_in_place && !entropy_R.defined()) return;
  const at::Tensor p = (scaled.z - lse).exp_();
  if (entropy_R.defined()) {
    // A logit of -inf has probability 0 and must add nothing, but 0 times -inf
    // is NaN.
    const at::Tensor terms =
        at::where(p == 0, at::zeros({}, p.options()), p * scaled.z);
    entropy_R.narrow(0, begin, count).copy_(lse.squeeze(1) - terms.sum(1));
  }
  if (softmax_in_place) {
    rows.copy_(scaled.tanh.defined() ? p * (1 - scaled.tanh.square()) : p);
  }
}

void VocabRowsReference(at::Tensor& logits_RV, const VocabRowsInput& input,
                        bool softmax_in_place, at::Tensor& logprobs_E,
                        at::Tensor& entropy_R) {
  const int64_t rows = logits_RV.size(0);
  // Passes the size of the result, because otherwise repeat_interleave would
  // wait for the device to compute it.
  const at::Tensor row_of_entry_E =
      at::repeat_interleave(input.row_offsets.diff(),
                            std::optional<int64_t>(input.targets_E.numel()));
  // Reads the targets' logits before the softmax overwrites them.
  const at::Tensor target_E =
      logits_RV.index({row_of_entry_E, input.targets_E});
  at::Tensor lse_R = at::empty({rows}, logits_RV.options());
  const int64_t block = std::max<int64_t>(
      1, kReferenceBlockElements / std::max<int64_t>(1, logits_RV.size(1)));
  for (int64_t begin = 0; begin < rows; begin += block) {
    ScoreBlock(logits_RV, input, begin, std::min(block, rows - begin),
               softmax_in_place, lse_R, entropy_R);
  }
  const at::Tensor temperature_E =
      input.temperature_R.to(logits_RV.dtype()).index_select(0, row_of_entry_E);
  const Scaled scaled = Scale(target_E, input.softcap, temperature_E);
  logprobs_E.copy_(scaled.z - lse_R.index_select(0, row_of_entry_E));
  if (softmax_in_place && input.clear_targets) {
    at::index_put_(logits_RV, {row_of_entry_E, input.targets_E},
                   at::zeros({}, logits_RV.options()));
  }
}

void CheckArguments(const at::Tensor& logits_RV, const VocabRowsInput& input,
                    const at::Tensor& logprobs_E, const at::Tensor& entropy_R) {
  TORCH_CHECK(logits_RV.dim() == 2, "vocab_rows wants logits_RV, got ",
              logits_RV.sizes());
  const at::ScalarType dtype = logits_RV.scalar_type();
  const int64_t rows = logits_RV.size(0);
  const int64_t entries = input.targets_E.numel();
  CheckArgument("logits_RV", logits_RV, logits_RV, dtype, logits_RV.sizes());
  CheckArgument("row_offsets", input.row_offsets, logits_RV, at::kLong,
                {rows + 1});
  CheckArgument("targets_E", input.targets_E, logits_RV, at::kLong, {entries});
  CheckArgument("temperature_R", input.temperature_R, logits_RV, at::kFloat,
                {rows});
  CheckArgument("logprobs_E", logprobs_E, logits_RV, dtype, {entries});
  if (entropy_R.defined()) {
    CheckArgument("entropy_R", entropy_R, logits_RV, dtype, {rows});
  }
}

}  // namespace

void VocabRows(at::Tensor& logits_RV, const VocabRowsInput& input,
               bool softmax_in_place, at::Tensor& logprobs_E,
               at::Tensor& entropy_R) {
  CheckArguments(logits_RV, input, logprobs_E, entropy_R);
  const int64_t rows = logits_RV.size(0);
  const int64_t vocab = logits_RV.size(1);
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(logits_RV) && logits_RV.scalar_type() == at::kFloat) {
      return cuda::VocabRows(logits_RV, input, softmax_in_place, logprobs_E,
                             entropy_R);
    }
  }
  if (!HasCpuKernel(logits_RV) || vocab > kernels::cpu::kMaxVocab) {
    return VocabRowsReference(logits_RV, input, softmax_in_place, logprobs_E,
                              entropy_R);
  }
  float* logits = logits_RV.mutable_data_ptr<float>();
  const int64_t* offsets = input.row_offsets.const_data_ptr<int64_t>();
  const int64_t* targets = input.targets_E.const_data_ptr<int64_t>();
  const float* temperatures = input.temperature_R.const_data_ptr<float>();
  float* logprobs = logprobs_E.mutable_data_ptr<float>();
  float* entropies =
      entropy_R.defined() ? entropy_R.mutable_data_ptr<float>() : nullptr;
  const auto row_kernel = kernels::cpu::Kernels().vocab_row;
  at::parallel_for(0, rows, RowGrain(vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const row = logits + r * vocab;
      const int64_t first = offsets[r] - offsets[0];
      const int64_t count = offsets[r + 1] - offsets[r];
      row_kernel(row, vocab,
                 {.softcap = static_cast<float>(input.softcap),
                  .temperature = temperatures[r],
                  .write_softmax = softmax_in_place},
                 targets + first, count, logprobs + first,
                 entropies == nullptr ? nullptr : entropies + r);
      if (!softmax_in_place || !input.clear_targets) continue;
      for (int64_t e = first; e < first + count; ++e) row[targets[e]] = 0;
    }
  });
}

void VocabWeights(const at::Tensor& logits_RV, const VocabRowsInput& input,
                  at::Tensor& weights_RV, at::Tensor& scale_R,
                  at::Tensor& logprobs_E, at::Tensor& entropy_R) {
  CheckArguments(logits_RV, input, logprobs_E, entropy_R);
  CheckArgument("weights_RV", weights_RV, logits_RV, at::kBFloat16,
                logits_RV.sizes());
  CheckArgument("scale_R", scale_R, logits_RV, at::kFloat, {logits_RV.size(0)});
  TORCH_CHECK(kHasCudaKernels && HasCudaKernel(logits_RV) &&
                  logits_RV.scalar_type() == at::kFloat,
              "vocab weights want f32 logits on a CUDA device, got ",
              logits_RV.scalar_type(), " on ", logits_RV.device());
  if constexpr (kHasCudaKernels) {
    cuda::VocabWeights(logits_RV, input, weights_RV, scale_R, logprobs_E,
                       entropy_R);
  }
}

}  // namespace weft::ops
