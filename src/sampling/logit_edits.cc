#include "src/sampling/logit_edits.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>

#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/sampling/draw_rows_cuda.h"

namespace weft::sampling {
namespace {

constexpr int64_t kWordBits = 32;
// The fewest entries of a list on the device.
constexpr int64_t kLeastCapacity = 64;
constexpr auto kEditBytes = static_cast<int64_t>(sizeof(LogitEdit));

// Returns the entry of `token` in edits sorted by token, or null.
const LogitEdit* Find(const std::vector<LogitEdit>& edits, int32_t token) {
  const auto at = std::ranges::lower_bound(edits, token, {}, &LogitEdit::token);
  return at != edits.end() && at->token == token ? &*at : nullptr;
}

// Returns the edits of biases and of the prompt's tokens, in the order of
// tokens.
std::vector<LogitEdit> EditsOf(const SamplingConfig& config,
                               const std::vector<int32_t>& prompt) {
  std::vector<LogitEdit> edits;
  if (config.repetition_penalty != 1) {
    std::vector<int32_t> tokens = prompt;
    std::ranges::sort(tokens);
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    edits.reserve(tokens.size() + config.logit_bias.size());
    for (const int32_t token : tokens) {
      edits.push_back(
          {.token = token, .repetition = config.repetition_penalty});
    }
  }
  const auto num_tokens = static_cast<std::ptrdiff_t>(edits.size());
  for (const auto& [token, bias] : config.logit_bias) {
    const auto end = edits.begin() + num_tokens;
    const auto at = std::ranges::lower_bound(edits.begin(), end, token, {},
                                             &LogitEdit::token);
    if (at != end && at->token == token) {
      at->bias = bias;
    } else {
      edits.push_back({.token = token, .bias = bias});
    }
  }
  std::ranges::sort(edits, {}, &LogitEdit::token);
  return edits;
}

// Returns the bits of the tokens `banned` and, unless `allowed` is empty, of
// all tokens that are not in `allowed`. Undefined if that bans none.
at::Tensor BitsOf(const std::vector<int32_t>& allowed,
                  const std::vector<int32_t>& banned, int64_t vocab,
                  at::Device device) {
  if (allowed.empty() && banned.empty()) return {};
  at::Tensor words = at::full({ops::CeilDiv(vocab, kWordBits)},
                              allowed.empty() ? 0 : -1, at::kInt);
  auto* const bits = reinterpret_cast<uint32_t*>(words.mutable_data_ptr());
  const auto bit = [](int32_t token) { return 1U << token % kWordBits; };
  for (const int32_t token : allowed) bits[token / kWordBits] &= ~bit(token);
  for (const int32_t token : banned) bits[token / kWordBits] |= bit(token);
  return ops::ToDevice(words, device);
}

void Apply(const std::vector<LogitEdit>& edits, float* logits) {
  for (const LogitEdit& edit : edits) {
    const float x = logits[edit.token] + edit.bias;
    const float scaled = x > 0 ? x / edit.repetition : x * edit.repetition;
    logits[edit.token] = scaled - edit.penalty;
  }
}

void Ban(const at::Tensor& banned, int64_t vocab, float* logits) {
  const auto* bits = reinterpret_cast<const uint32_t*>(banned.const_data_ptr());
  for (int64_t begin = 0; begin < vocab; begin += kWordBits) {
    const uint32_t word = bits[begin / kWordBits];
    if (word == 0) continue;
    const int64_t end = std::min(begin + kWordBits, vocab);
    if (word == ~uint32_t{0}) {
      std::fill(logits + begin, logits + end,
                -std::numeric_limits<float>::infinity());
      continue;
    }
    for (int64_t token = begin; token < end; ++token) {
      if ((word >> (token - begin) & 1U) == 0) continue;
      logits[token] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

SharedEdits::SharedEdits(const SamplingConfig& config,
                         const std::vector<int32_t>& prompt,
                         const std::vector<int32_t>& stops, int64_t vocab,
                         at::Device device)
    : has_penalties_(config.has_penalties()),
      repetition_(config.repetition_penalty),
      presence_(config.presence_penalty),
      frequency_(config.frequency_penalty),
      edits_(EditsOf(config, prompt)),
      banned_(BitsOf(config.allowed_token_ids, {}, vocab, device)),
      early_banned_(config.min_tokens > 0
                        ? BitsOf(config.allowed_token_ids, stops, vocab, device)
                        : at::Tensor()) {
  if (!device.is_cpu() && !edits_.empty()) {
    edits_on_device_ = ops::ToDevice(std::as_bytes(std::span(edits_)), device);
  }
}

void SequenceEdits::Push(int32_t token) {
  if (!shared_->has_penalties_) return;
  const auto [found, is_new] = drawn_.try_emplace(
      token, Drawn{.place = static_cast<int32_t>(own_.size())});
  Drawn& drawn = found->second;
  if (is_new) {
    // The shared edits have the repetition penalty of the prompt's tokens.
    const LogitEdit* const shared = Find(shared_->edits_, token);
    const bool in_prompt = shared != nullptr && shared->repetition != 1;
    own_.push_back(
        {.token = token, .repetition = in_prompt ? 1 : shared_->repetition_});
  }
  ++drawn.count;
  own_[drawn.place].penalty =
      shared_->presence_ +
      shared_->frequency_ * static_cast<float>(drawn.count);
  if (own_on_device_.defined()) pushed_.push_back(drawn.place);
}

SequenceEdits::DeviceList SequenceEdits::UpdateOn(at::Device device) {
  const auto size = static_cast<int64_t>(own_.size());
  std::vector<int32_t> stale = std::exchange(pushed_, {});
  if (own_on_device_.defined() ? own_on_device_.numel() < size * kEditBytes
                               : size > 0) {
    own_on_device_ =
        at::empty({std::max(kLeastCapacity, 2 * size) * kEditBytes},
                  at::TensorOptions(at::kByte).device(device));
    stale.clear();
    for (int32_t place = 0; place < size; ++place) stale.push_back(place);
  }
  std::ranges::sort(stale);
  stale.erase(std::unique(stale.begin(), stale.end()), stale.end());
  return {.bytes = own_on_device_, .stale_places = std::move(stale)};
}

void EditRows(const at::Tensor& logits_RV, const std::vector<RowEdits>& rows) {
  TORCH_CHECK(logits_RV.dim() == 2 && logits_RV.is_contiguous() &&
                  logits_RV.scalar_type() == at::kFloat,
              "logits are changed in contiguous rows of f32, got ",
              logits_RV.scalar_type(), " ", logits_RV.sizes());
  for (const RowEdits& row : rows) {
    TORCH_CHECK(row.row >= 0 && row.row < logits_RV.size(0), "an edit of row ",
                row.row, ", there are ", logits_RV.size(0));
  }
  if constexpr (ops::kHasCudaKernels) {
    if (logits_RV.is_cuda()) return cuda::EditRows(logits_RV, rows);
  }
  const int64_t vocab = logits_RV.size(1);
  for (const RowEdits& row : rows) {
    float* const logits = logits_RV.mutable_data_ptr<float>() + row.row * vocab;
    const SharedEdits& shared = row.edits->shared();
    Apply(shared.edits(), logits);
    Apply(row.edits->own(), logits);
    const at::Tensor& banned = shared.banned(row.early);
    if (banned.defined()) Ban(banned, vocab, logits);
  }
}

}  // namespace weft::sampling
