#include "src/loss/fused_head.h"

#include <ATen/ATen.h>

#include "src/loss/head_chunks.h"
#include "src/loss/head_products.h"
#include "src/loss/vocab_shard.h"
#include "src/ops/host_copy.h"

namespace weft::loss {
namespace {

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
  return {
      .logprobs_E = part(result.logprobs_E, first_entry, end_entry),
      .entropies_R = part(result.entropies_R, chunk.begin, end),
      .slopes_E = part(result.target_slope_E, first_entry, end_entry),
      .share_R = part(result.share_R, chunk.begin, end),
  };
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
  ops::VocabRows(chunk.logits_RV, chunk.input, /*softmax_in_place=*/false,
                 scores.logprobs_E, scores.entropies_R);
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
}

// Computes U for the rows of a chunk. Rows with and without a filter use
// separate products, so no row depends on another row's filter. If share_R is
// defined, `softmax_RV` is the softmax over a part of the vocabulary. Filters
// then apply to this softmax times the share.
void ProjectRows(const HeadChunk& chunk, const at::Tensor& softmax_RV,
                 const at::Tensor& weight_VH, const std::vector<float>& filters,
                 const at::Tensor& share_R, at::Tensor& out_RH) {
  if (filters.empty()) {
    ComputeProjection(softmax_RV, weight_VH, out_RH);
    return;
  }
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

}  // namespace weft::loss
