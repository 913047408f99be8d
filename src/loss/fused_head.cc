#include "src/loss/fused_head.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "src/loss/head_chunks.h"
#include "src/loss/head_products.h"
#include "src/loss/head_support.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/int8_weight.h"
#include "src/ops/pointwise.h"

namespace weft::loss {
namespace {

// Sets `entries` to the indices of row r's entries, sorted by target.
void TakeEntriesByTarget(const ScoreRows& rows, size_t r,
                         std::vector<int64_t>& entries) {
  entries.resize(rows.row_offsets[r + 1] - rows.row_offsets[r]);
  std::iota(entries.begin(), entries.end(), rows.row_offsets[r]);
  if (entries.size() > 1) {
    std::ranges::stable_sort(entries, {},
                             [&rows](int64_t e) { return rows.targets[e]; });
  }
}

// Computes the coefficients. If several entries of a row have the same
// target, merges them. Their coefficients nearly cancel for confident
// predictions, so only the sum may be rounded to f32. `gradients_E` is
// dLoss/dlogprob. `slopes_E` is D at the targets, and empty without softcap.
HeadCoefficients MakeHeadCoefficients(const ScoreRows& rows,
                                      const std::vector<double>& gradients_E,
                                      const std::vector<double>& logprobs_E,
                                      const std::vector<double>& slopes_E) {
  HeadCoefficients result;
  result.row_offsets.reserve(rows.row_offsets.size());
  result.rows_R.reserve(rows.temperatures.size());
  result.targets.reserve(rows.targets.size());
  result.entries.reserve(rows.targets.size());
  result.row_offsets.push_back(0);
  std::vector<int64_t> entries;
  for (size_t r = 0; r < rows.temperatures.size(); ++r) {
    TakeEntriesByTarget(rows, r, entries);
    const auto scale = static_cast<double>(rows.temperatures[r]);
    double sum = 0;
    for (const int64_t e : entries) sum += gradients_E[e] / scale;
    for (size_t i = 0; i < entries.size();) {
      const int64_t first = entries[i];
      const int64_t target = rows.targets[first];
      double own = 0;
      for (; i < entries.size() && rows.targets[entries[i]] == target; ++i) {
        own += gradients_E[entries[i]] / scale;
      }
      const double logprob = logprobs_E[first];
      const double slope = slopes_E.empty() ? 1.0 : slopes_E[first];
      result.targets.push_back(target);
      result.entries.push_back(slope * (own * -std::expm1(logprob) -
                                        (sum - own) * std::exp(logprob)));
    }
    result.row_offsets.push_back(static_cast<int64_t>(result.targets.size()));
    result.rows_R.push_back(-sum);
  }
  return result;
}

// A layer of entries. Layer i has entry i of every row with more than i
// entries. So no two entries of a layer add to the same row. Layers are added
// one after another, so each row's sum has a fixed order.
struct EntryLayer {
  std::vector<int64_t> rows;  // Counted from LayerEntries' `begin`.
  std::vector<int64_t> targets;
  std::vector<double> coefficients;
};

// Returns the layers of the entries of rows [begin, begin + count).
std::vector<EntryLayer> LayerEntries(const HeadCoefficients& coefficients,
                                     int64_t begin, int64_t count) {
  std::vector<EntryLayer> layers;
  for (int64_t r = begin; r < begin + count; ++r) {
    const int64_t first = coefficients.row_offsets[r];
    for (int64_t e = first; e < coefficients.row_offsets[r + 1]; ++e) {
      const size_t rank = e - first;
      if (rank == layers.size()) layers.emplace_back();
      layers[rank].rows.push_back(r - begin);
      layers[rank].targets.push_back(coefficients.targets[e]);
      layers[rank].coefficients.push_back(coefficients.entries[e]);
    }
  }
  return layers;
}

HeadResult AllocateResult(int64_t num_rows, int64_t num_entries, int64_t hidden,
                          const at::TensorOptions& tensor,
                          const HeadOptions& options, bool want_gradient,
                          bool want_entropy) {
  HeadResult result;
  result.logprobs_E = at::empty({num_entries}, tensor);
  if (want_entropy) result.entropies_R = at::empty({num_rows}, tensor);
  if (want_gradient) {
    result.projection_RH = at::empty({num_rows, hidden}, tensor);
    if (options.softcap > 0) {
      result.target_slope_E = at::empty({num_entries}, tensor);
    }
    if (options.shard.group != nullptr) {
      result.share_R = at::empty({num_rows}, tensor);
    }
  }
  return result;
}

// Returns views of the result's tensors for the rows and entries of a chunk.
ChunkScores ScoresOf(const HeadResult& result, const ScoreRows& rows,
                     const HeadChunk& chunk) {
  const auto part = [](const at::Tensor& x, int64_t begin, int64_t end) {
    return x.defined() ? x.slice(0, begin, end) : x;
  };
  const int64_t end = chunk.begin + chunk.count;
  const int64_t first_entry = rows.row_offsets[chunk.begin];
  const int64_t end_entry = rows.row_offsets[end];
  return {.logprobs_E = part(result.logprobs_E, first_entry, end_entry),
          .entropies_R = part(result.entropies_R, chunk.begin, end),
          .slopes_E = part(result.target_slope_E, first_entry, end_entry),
          .share_R = part(result.share_R, chunk.begin, end)};
}

// Scores a chunk on a rank that has the whole vocabulary. Other ranks call
// ScoreChunkOfShard. If a gradient is wanted, returns softmax * D, with 0 at
// each row's own targets; otherwise an undefined tensor.
at::Tensor ScoreChunk(HeadChunk& chunk, bool want_gradient,
                      ChunkScores& scores) {
  if (scores.slopes_E.defined()) scores.slopes_E.copy_(chunk.TargetSlopes());
  if (want_gradient) {
    return chunk.SoftmaxBesideTargets(scores.logprobs_E, scores.entropies_R);
  }
  const SupportScores supported =
      chunk.supports.Score(chunk.logits_RV, chunk.input);
  ops::VocabRows(chunk.logits_RV, chunk.input, /*softmax_in_place=*/false,
                 scores.logprobs_E, scores.entropies_R);
  chunk.supports.PutScores(supported, scores.logprobs_E, scores.entropies_R);
  return {};
}

void CheckShard(const at::Tensor& weight_VH, const VocabShard& shard) {
  if (shard.group == nullptr) return;
  const int64_t expected = shard.group->shard().Of(shard.vocab).size();
  TORCH_CHECK(weight_VH.size(0) == expected, "the head has ", weight_VH.size(0),
              " rows of a vocabulary of ", shard.vocab, "; this rank's are ",
              expected);
}

void CheckRows(const at::Tensor& hidden_RH, const ScoreRows& rows) {
  const size_t num_rows = static_cast<size_t>(hidden_RH.size(0));
  TORCH_CHECK(rows.row_offsets.size() == num_rows + 1 &&
                  rows.temperatures.size() == num_rows &&
                  (rows.filters.empty() || rows.filters.size() == num_rows),
              "the head has ", num_rows, " rows, ", rows.row_offsets.size(),
              " row offsets, ", rows.temperatures.size(), " temperatures and ",
              rows.filters.size(), " filters");
  TORCH_CHECK(
      rows.row_offsets.back() == static_cast<int64_t>(rows.targets.size()),
      "the head's last row offset is ", rows.row_offsets.back(), " for ",
      rows.targets.size(), " targets");
  const RowSupports& supports = rows.supports;
  TORCH_CHECK(supports.rows.empty() ||
                  (supports.offsets.size() == supports.rows.size() + 1 &&
                   supports.offsets.back() ==
                       static_cast<int64_t>(supports.ids.size())),
              "the head has ", supports.rows.size(), " rows with a support, ",
              supports.offsets.size(), " offsets and ", supports.ids.size(),
              " ids");
}

// Computes U for the rows of a chunk. Rows with and without a filter use
// separate products, so no row depends on another row's filter. If share_R is
// defined, `softmax_RV` is the softmax over a part of the vocabulary. Filters
// then apply to this softmax times the share.
void ProjectRows(const HeadChunk& chunk, const at::Tensor& softmax_RV,
                 const at::Tensor& weight_VH, const std::vector<float>& filters,
                 const at::Tensor& share_R, at::Tensor& out_RH) {
  if (filters.empty()) return ComputeProjection(softmax_RV, weight_VH, out_RH);
  const float* filter = filters.data() + chunk.begin;
  for (int64_t begin = 0; begin < chunk.count;) {
    int64_t end = begin + 1;
    while (end < chunk.count && (filter[end] > 0) == (filter[begin] > 0)) {
      ++end;
    }
    const at::Tensor p_RV = softmax_RV.narrow(0, begin, end - begin);
    at::Tensor rows_RH = out_RH.narrow(0, begin, end - begin);
    if (filter[begin] > 0) {
      at::Tensor own_R =
          ops::ToDevice(std::vector<float>(filter + begin, filter + end),
                        p_RV.device(), p_RV.scalar_type());
      if (share_R.defined()) own_R.div_(share_R.slice(0, begin, end));
      ComputeFilteredProjection(p_RV, weight_VH, own_R, rows_RH);
    } else {
      ComputeProjection(p_RV, weight_VH, rows_RH);
    }
    begin = end;
  }
}

// Multiplies U and projected_nR by the rank's share. Before the call, they are
// sums weighted by the rank's local softmax. After it, they are the rank's
// terms of sums over all ranks.
void ScaleToShare(HeadResult& result, const lora::LoraRouting& routing) {
  const at::Tensor share_R1 = result.share_R.unsqueeze(1);
  result.projection_RH.mul_(share_R1);
  for (size_t s = 0; s < result.projected_nR.size(); ++s) {
    if (!result.projected_nR[s].defined()) continue;
    result.projected_nR[s].mul_(
        share_R1.slice(0, routing[s].begin, routing[s].end));
  }
}

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

// Joins the columns of all ranks' logits. The ranks' numbers of columns differ
// by at most one, so each rank pads its part to the largest number.
at::Tensor GatherColumns(const at::Tensor& logits_RV, const VocabShard& shard) {
  const int size = shard.group->shard().size;
  const int64_t width = (shard.vocab + size - 1) / size;
  at::Tensor padded_VR =
      at::zeros({width, logits_RV.size(0)}, logits_RV.options());
  padded_VR.narrow(0, 0, logits_RV.size(1)).copy_(logits_RV.t());
  const at::Tensor all_SVR = shard.group->AllGather(padded_VR);
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank) {
    const parallel::Shard part{.rank = rank, .size = size};
    parts.push_back(all_SVR[rank].narrow(0, 0, part.Of(shard.vocab).size()));
  }
  return at::cat(parts).t();
}

}  // namespace

HeadResult ScoreHead(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                     const ScoreRows& rows, const HeadOptions& options,
                     bool want_gradient, bool want_entropy) {
  CheckRows(hidden_RH, rows);
  CheckShard(weight_VH, options.shard);
  const int64_t num_rows = hidden_RH.size(0);
  const auto dtype = weight_VH.options().dtype(HeadComputeType(weight_VH));
  HeadResult result = AllocateResult(
      num_rows, static_cast<int64_t>(rows.targets.size()), hidden_RH.size(1),
      dtype, options, want_gradient, want_entropy);
  if (num_rows == 0) return result;
  parallel::Communicator* const group = options.shard.group;
  OwnEntries own;
  EntryPlaces places;
  if (group != nullptr) {
    own = EntriesOfShard(rows, options.shard);
    places = PlacesOf(rows, own, weight_VH.device());
  }
  HeadChunks chunks(hidden_RH, weight_VH, group != nullptr ? own.rows : rows,
                    options);
  if (want_gradient && TakesWeights(weight_VH, rows, options)) {
    result.scale_R = at::empty({num_rows}, dtype);
    chunks.TakeWeights(result.scale_R);
  }
  result.shrunk_nR = chunks.lora().Shrink(hidden_RH);
  chunks.ForEach(0, num_rows, result.shrunk_nR, [&](HeadChunk& chunk) {
    ChunkScores scores = ScoresOf(result, rows, chunk);
    at::Tensor softmax_RV = chunk.logits_RV;
    if (group != nullptr) {
      ScoreChunkOfShard(chunk, rows, places, *group, scores);
    } else {
      softmax_RV = ScoreChunk(chunk, want_gradient, scores);
    }
    if (!want_gradient) return;
    at::Tensor projection_RH =
        result.projection_RH.narrow(0, chunk.begin, chunk.count);
    ProjectRows(chunk, softmax_RV, weight_VH, rows.filters, scores.share_R,
                projection_RH);
    chunks.lora().Project(softmax_RV, chunk.begin, result.projected_nR);
  });
  if (result.share_R.defined()) ScaleToShare(result, rows.routing);
  return result;
}

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

at::Tensor HeadLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                      const lora::LoraRouting& routing, double softcap,
                      const VocabShard& shard) {
  const at::ScalarType compute_type = HeadComputeType(weight_VH);
  at::Tensor logits_RV = at::empty({hidden_RH.size(0), weight_VH.size(0)},
                                   weight_VH.options().dtype(compute_type));
  ComputeLogits(hidden_RH, weight_VH, logits_RV);
  const HeadLora lora(routing, compute_type);
  lora.AddLogits(lora.Shrink(hidden_RH), /*chunk_begin=*/0, logits_RV);
  if (softcap > 0) ops::SoftcapInPlace(softcap, logits_RV);
  if (shard.group != nullptr) logits_RV = GatherColumns(logits_RV, shard);
  return logits_RV.to(at::kFloat).contiguous();
}

}  // namespace weft::loss
