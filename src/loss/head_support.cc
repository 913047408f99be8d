#include "src/loss/head_support.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "src/ops/host_copy.h"

namespace weft::loss {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Logits after the softcap, in f64, and the softcap's derivative.
struct Capped {
  at::Tensor logits;
  at::Tensor slope;  // Undefined without softcap.
};

Capped Cap(const at::Tensor& raw, double softcap) {
  const at::Tensor wide = raw.to(at::kDouble);
  if (softcap <= 0) return {wide, {}};
  const at::Tensor tanh = (wide / softcap).tanh_();
  return {tanh * softcap, 1 - tanh.square()};
}

}  // namespace

ChunkSupports::ChunkSupports(const ScoreRows& rows, int64_t begin,
                             int64_t count, at::Device device) {
  const RowSupports& all = rows.supports;
  const auto first = std::ranges::lower_bound(all.rows, begin);
  const auto last = std::ranges::lower_bound(all.rows, begin + count);
  if (first == last) return;
  std::vector<int64_t> own_rows, owners, places, entries, entry_owners;
  const int64_t first_entry = rows.row_offsets[begin];
  const int64_t base = first - all.rows.begin();
  for (int64_t m = base; m < last - all.rows.begin(); ++m) {
    width_ = std::max(width_, all.offsets[m + 1] - all.offsets[m]);
  }
  for (int64_t m = 0; m < last - first; ++m) {
    const int64_t row = all.rows[base + m];
    own_rows.push_back(row - begin);
    for (int64_t e = rows.row_offsets[row]; e < rows.row_offsets[row + 1];
         ++e) {
      entries.push_back(e - first_entry);
      entry_owners.push_back(m);
    }
    const int64_t size = all.offsets[base + m + 1] - all.offsets[base + m];
    for (int64_t k = 0; k < size; ++k) {
      owners.push_back(m);
      places.push_back(m * width_ + k);
    }
  }
  const auto ids = all.ids.begin();
  rows_M_ = ops::ToDevice(own_rows, device);
  ids_n_ = ops::ToDevice(
      std::vector<int64_t>(ids + all.offsets[base],
                           ids + all.offsets[base + (last - first)]),
      device);
  owners_n_ = ops::ToDevice(owners, device);
  places_n_ = ops::ToDevice(places, device);
  entries_e_ = ops::ToDevice(entries, device);
  owners_e_ = ops::ToDevice(entry_owners, device);
}

SupportScores ChunkSupports::Score(const at::Tensor& logits_RV,
                                   const ops::VocabRowsInput& input) const {
  if (!rows_M_.defined()) return {};
  const auto options = logits_RV.options().dtype(at::kDouble);
  const int64_t num_rows = rows_M_.numel();
  // Returns the values of the ids as [M, width], with `absent` after a row's
  // last id. So sums over a row have one order.
  const auto by_row = [&](const at::Tensor& values_n, double absent) {
    return at::full({num_rows * width_}, absent, options)
        .index_put_({places_n_}, values_n)
        .view({num_rows, width_});
  };
  const at::Tensor temperature_M =
      input.temperature_R.index_select(0, rows_M_).to(at::kDouble);
  const Capped ids =
      Cap(logits_RV.index({rows_M_.index_select(0, owners_n_), ids_n_}),
          input.softcap);
  const at::Tensor z_n = ids.logits / temperature_M.index_select(0, owners_n_);
  SupportScores scores;
  scores.lse_M = by_row(z_n, kMinusInfinity).logsumexp(1);
  const at::Tensor p_n = (z_n - scores.lse_M.index_select(0, owners_n_)).exp_();
  scores.entropies_M = scores.lse_M - by_row(p_n * z_n, 0).sum(1);
  scores.softmax_n = ids.slope.defined() ? p_n * ids.slope : p_n;
  const at::Tensor target_e =
      logits_RV.index({rows_M_.index_select(0, owners_e_),
                       input.targets_E.index_select(0, entries_e_)});
  scores.logprobs_e = Cap(target_e, input.softcap).logits /
                          temperature_M.index_select(0, owners_e_) -
                      scores.lse_M.index_select(0, owners_e_);
  return scores;
}

void ChunkSupports::PutScores(const SupportScores& scores,
                              at::Tensor& logprobs_E,
                              at::Tensor& entropies_R) const {
  if (!rows_M_.defined()) return;
  logprobs_E.index_copy_(0, entries_e_,
                         scores.logprobs_e.to(logprobs_E.scalar_type()));
  if (!entropies_R.defined()) return;
  entropies_R.index_copy_(0, rows_M_,
                          scores.entropies_M.to(entropies_R.scalar_type()));
}

void ChunkSupports::PutLogSums(const SupportScores& scores,
                               at::Tensor& lse_R) const {
  if (rows_M_.defined()) lse_R.index_copy_(0, rows_M_, scores.lse_M);
}

void ChunkSupports::PutSoftmax(const SupportScores& scores,
                               const ops::VocabRowsInput& input,
                               at::Tensor& softmax_RV,
                               at::Tensor scale_R) const {
  if (!rows_M_.defined()) return;
  softmax_RV.index_fill_(0, rows_M_, 0);
  at::index_put_(softmax_RV, {rows_M_.index_select(0, owners_n_), ids_n_},
                 scores.softmax_n.to(softmax_RV.scalar_type()));
  if (scale_R.defined()) scale_R.index_fill_(0, rows_M_, 1);
  if (!input.clear_targets) return;
  at::index_put_(softmax_RV,
                 {rows_M_.index_select(0, owners_e_),
                  input.targets_E.index_select(0, entries_e_)},
                 at::zeros({}, softmax_RV.options()));
}

RowSupports SupportsOfShard(const RowSupports& supports, int64_t begin,
                            int64_t end) {
  RowSupports own{.rows = supports.rows, .offsets = {}, .ids = {}};
  if (own.rows.empty()) return own;
  own.offsets.push_back(0);
  for (size_t m = 0; m < supports.rows.size(); ++m) {
    for (int64_t i = supports.offsets[m]; i < supports.offsets[m + 1]; ++i) {
      const int64_t id = supports.ids[i];
      if (id >= begin && id < end)
        own.ids.push_back(static_cast<int32_t>(id - begin));
    }
    own.offsets.push_back(static_cast<int64_t>(own.ids.size()));
  }
  return own;
}

}  // namespace weft::loss
