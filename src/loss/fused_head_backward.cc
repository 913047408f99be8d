#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "src/loss/fused_head.h"
#include "src/loss/head_chunks.h"
#include "src/loss/head_coefficients.h"
#include "src/loss/vocab_shard.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/int8_weight.h"

namespace weft::loss {
namespace {

// The number of rows for which Combine gathers the targets' weights at a time.
constexpr int64_t kCombineRows = 1024;

// Returns the tensor's values as doubles, or nothing if it is undefined.
std::vector<double> ToDoubles(const at::Tensor& values) {
  if (!values.defined()) return {};
  const at::Tensor doubles = values.to(at::kDouble).contiguous();
  const double* data = doubles.const_data_ptr<double>();
  return {data, data + doubles.numel()};
}

// Returns the coefficients rows_R of rows [first, first + count) as a column,
// on the device and in the dtype of `like`.
at::Tensor RowFactors(const HeadCoefficients& coefficients, int64_t first,
                      int64_t count, const at::Tensor& like) {
  const auto begin = coefficients.rows_R.begin() + first;
  return ops::ToDevice(std::vector<double>(begin, begin + count), like.device(),
                       like.scalar_type())
      .unsqueeze(1);
}

// Replaces the forward pass's (softmax * D) W of rows [begin, begin + n) by
// dz W. dz is the gradient of the logits. W [V, X] is the head's weight or an
// adapter's B.
void Combine(at::Tensor& projection_nX, const at::Tensor& weight_VX,
             const HeadCoefficients& coefficients, int64_t begin) {
  const at::Device device = projection_nX.device();
  const at::ScalarType dtype = projection_nX.scalar_type();
  const int64_t num_rows = projection_nX.size(0);
  for (int64_t done = 0; done < num_rows; done += kCombineRows) {
    const int64_t count = std::min(kCombineRows, num_rows - done);
    at::Tensor result_nX = projection_nX.narrow(0, done, count);
    result_nX.mul_(RowFactors(coefficients, begin + done, count, result_nX));
    for (const EntryLayer& layer :
         LayerEntries(coefficients, begin + done, count)) {
      const auto size = static_cast<int64_t>(layer.rows.size());
      const at::Tensor scaled =
          ops::WidenedRows(weight_VX, ops::ToDevice(layer.targets, device),
                           dtype)
              .mul_(ops::ToDevice(layer.coefficients, device, dtype)
                        .unsqueeze(1));
      if (size == count) {
        result_nX.add_(scaled);
      } else {
        result_nX.index_add_(0, ops::ToDevice(layer.rows, device), scaled);
      }
    }
  }
}

// Returns dz W of all rows in the weight's dtype, by one launch on CUDA.
// REQUIRES: forward.scale_R is defined.
at::Tensor CombineScaled(const HeadResult& forward, const at::Tensor& weight_VH,
                         const HeadCoefficients& coefficients) {
  at::Tensor dhidden_RH =
      at::empty(forward.projection_RH.sizes(), weight_VH.options());
  if constexpr (ops::kHasCudaKernels) {
    const at::Device device = weight_VH.device();
    ops::cuda::HeadGradient(
        forward.projection_RH,
        ops::ToDevice(coefficients.rows_R, device, at::kFloat), forward.scale_R,
        ops::ToDevice(coefficients.row_offsets, device),
        ops::ToDevice(coefficients.targets, device),
        ops::ToDevice(coefficients.entries, device, at::kFloat), weight_VH,
        dhidden_RH);
  }
  return dhidden_RH;
}

// Replaces the chunk's logits by their gradient dz. `share_R` has all rows, not
// only those of the chunk, and may be undefined.
void GradientOfLogits(HeadChunk& chunk, const HeadCoefficients& coefficients,
                      const at::Tensor& share_R) {
  const at::TensorOptions options = chunk.logits_RV.options();
  at::Tensor logprobs_E = at::empty({chunk.num_entries}, options);
  at::Tensor no_entropies;
  chunk.SoftmaxBesideTargets(logprobs_E, no_entropies);
  chunk.logits_RV.mul_(
      RowFactors(coefficients, chunk.begin, chunk.count, chunk.logits_RV));
  if (share_R.defined()) {
    chunk.logits_RV.mul_(
        share_R.narrow(0, chunk.begin, chunk.count).unsqueeze(1));
  }
  for (const EntryLayer& layer :
       LayerEntries(coefficients, chunk.begin, chunk.count)) {
    const at::Device device = options.device();
    at::index_put_(chunk.logits_RV,
                   {ops::ToDevice(layer.rows, device),
                    ops::ToDevice(layer.targets, device)},
                   ops::ToDevice(layer.coefficients, device,
                                 chunk.logits_RV.scalar_type()));
  }
}

// Adds the part of lm_head's adapters to dhidden, and adds dA and dB of lm_head
// to `gradients`.
void LoraBackward(const HeadChunks& chunks, HeadResult& forward,
                  const at::Tensor& hidden_RH, const ScoreRows& rows,
                  const HeadCoefficients& coefficients,
                  const lora::LoraGradients& gradients,
                  at::Tensor& dhidden_RH) {
  const HeadLora& lora = chunks.lora();
  for (size_t s = 0; s < rows.routing.size(); ++s) {
    if (!lora.Trains(s)) continue;
    const lora::LoraSegment& segment = rows.routing[s];
    const at::Tensor gradient_N = GradientOf(gradients, segment.version);
    at::Tensor& ds_nR = forward.projected_nR[s];
    Combine(ds_nR, lora.B(s), coefficients, segment.begin);
    lora.AddGradientOfHidden(s, ds_nR, dhidden_RH);
    if (!gradient_N.defined()) continue;
    lora.AddGradientOfA(s, ds_nR, hidden_RH, gradient_N);
    chunks.ForEach(segment.begin, segment.end, forward.shrunk_nR,
                   [&](HeadChunk& chunk) {
                     GradientOfLogits(chunk, coefficients, forward.share_R);
                     lora.AddGradientOfB(s, chunk.logits_RV, chunk.begin,
                                         forward.shrunk_nR[s], gradient_N);
                   });
  }
}

}  // namespace

at::Tensor HeadBackward(HeadResult forward, const at::Tensor& hidden_RH,
                        const at::Tensor& weight_VH, const ScoreRows& rows,
                        const HeadOptions& options, at::Tensor g_E,
                        const lora::LoraGradients& gradients) {
  TORCH_CHECK(forward.projection_RH.defined(),
              "HeadBackward needs want_gradient in the forward");
  TORCH_CHECK(g_E.numel() == static_cast<int64_t>(rows.targets.size()),
              "HeadBackward has ", g_E.numel(), " gradients for ",
              rows.targets.size(), " entries");
  ops::ToHost({&g_E, &forward.logprobs_E, &forward.target_slope_E});
  HeadCoefficients coefficients =
      MakeHeadCoefficients(rows, ToDoubles(g_E), ToDoubles(forward.logprobs_E),
                           ToDoubles(forward.target_slope_E));
  parallel::Communicator* const group = options.shard.group;
  OwnEntries own;
  if (group != nullptr) {
    coefficients = CoefficientsOfShard(coefficients, options.shard);
    own = EntriesOfShard(rows, options.shard);
  }
  if (forward.scale_R.defined()) {
    return CombineScaled(forward, weight_VH, coefficients)
        .to(hidden_RH.scalar_type());
  }
  at::Tensor dhidden_RH = std::move(forward.projection_RH);
  Combine(dhidden_RH, weight_VH, coefficients, 0);
  if (std::ranges::any_of(forward.shrunk_nR, &at::Tensor::defined)) {
    const HeadChunks chunks(hidden_RH, weight_VH,
                            group != nullptr ? own.rows : rows, options);
    LoraBackward(chunks, forward, hidden_RH, rows, coefficients, gradients,
                 dhidden_RH);
  }
  if (group != nullptr) group->AllReduce(dhidden_RH);
  return dhidden_RH.to(hidden_RH.scalar_type());
}

}  // namespace weft::loss
