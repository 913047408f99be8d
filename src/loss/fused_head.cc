#include "src/loss/fused_head.h"

#include <ATen/ATen.h>

#include "src/loss/head_chunks.h"
#include "src/loss/head_products.h"

namespace weft::loss {
namespace {

// The softcap's derivative at the chunk's targets; reads the raw logits.
void TargetSlope(const HeadChunk& chunk, at::Tensor& slope_E) {
  const at::Tensor raw_E = at::index(
      chunk.logits_RV, {chunk.RowsOfEntries(), chunk.input.targets_E});
  slope_E.copy_(1 - (raw_E / chunk.input.softcap).tanh_().square_());
}

HeadResult AllocateResult(int64_t num_rows, int64_t num_entries, int64_t hidden,
                          const at::TensorOptions& options, bool has_softcap,
                          bool want_gradient, bool want_entropy) {
  HeadResult result;
  result.logprobs_E = at::empty({num_entries}, options);
  if (want_entropy) result.entropies_R = at::empty({num_rows}, options);
  if (want_gradient) {
    result.projection_RH = at::empty({num_rows, hidden}, options);
    if (has_softcap) result.target_slope_E = at::empty({num_entries}, options);
  }
  return result;
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

// U of the chunk's rows. Rows with a filter and rows without one take their own
// products: nobody pays for a neighbour's filter.
void ProjectRows(const HeadChunk& chunk, const at::Tensor& weight_VH,
                 const std::vector<float>& filters, at::Tensor& out_RH) {
  if (filters.empty()) {
    ComputeProjection(chunk.logits_RV, weight_VH, out_RH);
    return;
  }
  const float* filter = filters.data() + chunk.begin;
  for (int64_t begin = 0; begin < chunk.count;) {
    int64_t end = begin + 1;
    while (end < chunk.count && (filter[end] > 0) == (filter[begin] > 0)) {
      ++end;
    }
    const at::Tensor p_RV = chunk.logits_RV.narrow(0, begin, end - begin);
    at::Tensor rows_RH = out_RH.narrow(0, begin, end - begin);
    if (filter[begin] > 0) {
      const std::vector<float> own(filter + begin, filter + end);
      ComputeFilteredProjection(p_RV, weight_VH,
                                at::tensor(own).to(p_RV.options()), rows_RH);
    } else {
      ComputeProjection(p_RV, weight_VH, rows_RH);
    }
    begin = end;
  }
}

}  // namespace

HeadResult ScoreHead(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                     const ScoreRows& rows, const HeadOptions& options,
                     bool want_gradient, bool want_entropy) {
  CheckRows(hidden_RH, rows);
  const int64_t num_rows = hidden_RH.size(0);
  const auto dtype = weight_VH.options().dtype(HeadComputeType(weight_VH));
  HeadResult result = AllocateResult(
      num_rows, static_cast<int64_t>(rows.targets.size()), weight_VH.size(1),
      dtype, options.softcap > 0, want_gradient, want_entropy);
  if (num_rows == 0) return result;
  const HeadChunks chunks(hidden_RH, weight_VH, rows, options);
  result.shrunk_nR = chunks.lora().Shrink(hidden_RH);
  chunks.ForEach(0, num_rows, result.shrunk_nR, [&](HeadChunk& chunk) {
    const auto entries = [&](const at::Tensor& x_E) {
      return x_E.narrow(0, chunk.first_entry, chunk.num_entries);
    };
    if (result.target_slope_E.defined()) {
      at::Tensor slope_E = entries(result.target_slope_E);
      TargetSlope(chunk, slope_E);
    }
    at::Tensor logprobs_E = entries(result.logprobs_E);
    at::Tensor entropies_R;
    if (want_entropy) {
      entropies_R = result.entropies_R.narrow(0, chunk.begin, chunk.count);
    }
    if (!want_gradient) {
      ops::VocabRows(chunk.logits_RV, chunk.input, /*softmax_in_place=*/false,
                     logprobs_E, entropies_R);
      return;
    }
    chunk.SoftmaxBesideTargets(logprobs_E, entropies_R);
    at::Tensor projection_RH =
        result.projection_RH.narrow(0, chunk.begin, chunk.count);
    ProjectRows(chunk, weight_VH, rows.filters, projection_RH);
    chunks.lora().Project(chunk.logits_RV, chunk.begin, result.projected_nR);
  });
  return result;
}

}  // namespace weft::loss
