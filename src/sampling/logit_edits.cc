#include "src/sampling/logit_edits.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "src/ops/host_copy.h"

namespace weft::sampling {

void EditRows(const at::Tensor& logits_RV, const std::vector<RowEdits>& rows) {
  TORCH_CHECK(logits_RV.dim() == 2 && logits_RV.is_contiguous() &&
                  logits_RV.scalar_type() == at::kFloat,
              "logits are changed in contiguous rows of f32, got ",
              logits_RV.scalar_type(), " ", logits_RV.sizes());
  std::vector<int64_t> places;  // Of the edited logits in the flat tensor.
  std::vector<float> biases, repetitions, penalties;
  for (const RowEdits& row : rows) {
    TORCH_CHECK(row.row >= 0 && row.row < logits_RV.size(0), "an edit of row ",
                row.row, ", there are ", logits_RV.size(0));
    for (const LogitEdit& edit : row.edits) {
      places.push_back(row.row * logits_RV.size(1) + edit.token);
      biases.push_back(edit.bias);
      repetitions.push_back(edit.repetition);
      penalties.push_back(edit.penalty);
    }
  }
  if (!places.empty()) {
    const auto on_device = [&](const auto& values) {
      return ops::ToDevice(values, logits_RV.device());
    };
    const at::Tensor places_E = on_device(places);
    const at::Tensor repetitions_E = on_device(repetitions);
    at::Tensor flat = logits_RV.view(-1);
    const at::Tensor x_E = flat.index_select(0, places_E) + on_device(biases);
    const at::Tensor scaled_E =
        at::where(x_E > 0, x_E / repetitions_E, x_E * repetitions_E);
    flat.index_copy_(0, places_E, scaled_E - on_device(penalties));
  }
  for (const RowEdits& row : rows) {
    if (!row.banned_V.defined()) continue;
    logits_RV.select(0, row.row)
        .masked_fill_(row.banned_V, -std::numeric_limits<float>::infinity());
  }
}

at::Tensor BannedTokens(const std::vector<int32_t>& allowed,
                        const std::vector<int32_t>& banned, int64_t vocab,
                        at::Device device) {
  if (allowed.empty() && banned.empty()) return {};
  at::Tensor banned_V = at::full({vocab}, !allowed.empty(), at::kBool);
  bool* const is_banned = banned_V.mutable_data_ptr<bool>();
  for (const int32_t token : allowed) is_banned[token] = false;
  for (const int32_t token : banned) is_banned[token] = true;
  return ops::ToDevice(banned_V, device);
}

SequenceEdits::SequenceEdits(const SamplingConfig& config,
                             const std::vector<int32_t>& prompt)
    : has_penalties_(config.has_penalties()),
      repetition_(config.repetition_penalty),
      presence_(config.presence_penalty),
      frequency_(config.frequency_penalty) {
  for (const auto& [token, bias] : config.logit_bias) {
    edits_.push_back({.token = token, .bias = bias});
  }
  if (repetition_ != 1) {
    for (const int32_t token : prompt) edits_.push_back({.token = token});
  }
  // A token may occur several times in the prompt, and have a bias. Its first
  // entry stays, which is the one with the bias.
  std::ranges::stable_sort(edits_, {}, &LogitEdit::token);
  const auto same_token = [](const LogitEdit& a, const LogitEdit& b) {
    return a.token == b.token;
  };
  edits_.erase(std::unique(edits_.begin(), edits_.end(), same_token),
               edits_.end());
  if (repetition_ == 1) return;
  for (const int32_t token : prompt) Of(token).repetition = repetition_;
}

void SequenceEdits::Push(int32_t token) {
  if (!has_penalties_) return;
  LogitEdit& edit = Of(token);
  edit.repetition = repetition_;
  ++edit.count;
  edit.penalty = presence_ + frequency_ * static_cast<float>(edit.count);
}

LogitEdit& SequenceEdits::Of(int32_t token) {
  const auto at =
      std::ranges::lower_bound(edits_, token, {}, &LogitEdit::token);
  if (at != edits_.end() && at->token == token) return *at;
  return *edits_.insert(at, {.token = token});
}

}  // namespace weft::sampling
