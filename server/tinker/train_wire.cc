#include "server/tinker/train_wire.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/refusals.h"
#include "server/tinker/tensor.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

absl::StatusOr<v1::LossFunction> ReadLossName(const std::string& name) {
  static const auto* const kNames = new std::map<std::string, v1::LossFunction>{
      {"cross_entropy", v1::LOSS_FUNCTION_CROSS_ENTROPY},
      {"importance_sampling", v1::LOSS_FUNCTION_IMPORTANCE_SAMPLING},
      {"ppo", v1::LOSS_FUNCTION_PPO},
      {"cispo", v1::LOSS_FUNCTION_CISPO},
      {"dro", v1::LOSS_FUNCTION_DRO},
      {"gspo", v1::LOSS_FUNCTION_GSPO}};
  const auto found = kNames->find(name);
  if (found != kNames->end()) return found->second;
  if (name == "stable_reinforce") return NoStableReinforce();
  return absl::UnimplementedError(
      absl::StrCat("loss_fn ", Quoted(name),
                   " is not offered: use cross_entropy, importance_sampling, "
                   "ppo, cispo, dro or gspo"));
}

absl::Status ReadLossOption(const std::string& name, double value,
                            v1::LossConfig* loss) {
  if (name == "clip_low_threshold") {
    loss->set_clip_low(value);
  } else if (name == "clip_high_threshold") {
    loss->set_clip_high(value);
  } else if (name == "beta") {
    loss->set_beta(value);
  } else {
    return absl::UnimplementedError(
        absl::StrCat("loss_fn_config.", Quoted(name),
                     " is not offered: use clip_low_threshold, "
                     "clip_high_threshold or beta"));
  }
  return absl::OkStatus();
}

absl::Status ReadLoss(const ForwardBackwardRequest& in, v1::LossConfig* loss) {
  WEFT_ASSIGN_OR_RETURN(const v1::LossFunction function,
                        ReadLossName(in.loss_fn()));
  loss->set_function(function);
  // The SDK also expects logprobs of the prompt's tokens, which have weight 0.
  loss->set_score_all(true);
  for (const auto& [name, value] : in.loss_fn_config_v2()) {
    if (value.value_case() != LossConfigValue::kNumber) {
      return BadField(absl::StrCat("loss_fn_config.", Quoted(name)),
                      "must be a number");
    }
    WEFT_RETURN_IF_ERROR(ReadLossOption(name, value.number(), loss));
  }
  if (!in.loss_fn_config_v2().empty()) return absl::OkStatus();
  for (const auto& [name, value] : in.loss_fn_config()) {
    WEFT_RETURN_IF_ERROR(ReadLossOption(name, value, loss));
  }
  return absl::OkStatus();
}

absl::Status ReadTokens(const Datum& in, v1::Datum* out) {
  for (const Chunk& chunk : in.model_input()) {
    if (!chunk.has_encoded_text()) {
      return absl::UnimplementedError(
          "model_input has an image or audio: only text is offered");
    }
    out->mutable_tokens_le()->append(chunk.encoded_text().tokens());
  }
  return absl::OkStatus();
}

// Reads sequence_ratio_mask, a mask for the loss gspo. Weft leaves out tokens
// with weight 0, so the mask becomes the weights. The loss with these weights
// equals the masked loss only if each mask value is 0 or 1, and the advantage
// is 0 where the mask is 0. Other masks get UNIMPLEMENTED.
absl::Status ReadMask(const Datum& in, v1::Datum* out) {
  const auto found = in.loss_fn_inputs().find("sequence_ratio_mask");
  if (found == in.loss_fn_inputs().end()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const std::vector<float> mask,
                        ReadFloats("sequence_ratio_mask", found->second));
  const auto given = in.loss_fn_inputs().find("advantages");
  std::vector<float> advantages(mask.size(), 0);
  if (given != in.loss_fn_inputs().end()) {
    WEFT_ASSIGN_OR_RETURN(advantages, ReadFloats("advantages", given->second));
  }
  for (size_t i = 0; i < mask.size(); ++i) {
    const bool ones = mask[i] == 0 || mask[i] == 1;
    const bool dropped =
        mask[i] == 0 && i < advantages.size() && advantages[i] != 0;
    if (ones && !dropped) continue;
    return absl::UnimplementedError(absl::StrCat(
        "sequence_ratio_mask[", i,
        "] is offered only as 0 or 1, and as 0 where the advantage is 0"));
  }
  out->set_weights_le(RawFloats(mask));
  return absl::OkStatus();
}

// Reads one tensor of loss_fn_inputs.
absl::Status ReadInput(const std::string& name, const Tensor& tensor,
                       v1::Datum* out) {
  // ReadMask reads this tensor for gspo. Other losses ignore it.
  if (name == "sequence_ratio_mask") return absl::OkStatus();
  if (name == "target_tokens") {
    WEFT_ASSIGN_OR_RETURN(const int64_t count, TargetsPerToken(name, tensor));
    out->set_targets_per_token(static_cast<uint32_t>(count));
    WEFT_ASSIGN_OR_RETURN(*out->mutable_targets_le(), ReadIds(name, tensor));
    return absl::OkStatus();
  }
  std::string* raw = nullptr;
  if (name == "weights") raw = out->mutable_weights_le();
  if (name == "logprobs") raw = out->mutable_logprobs_le();
  if (name == "advantages") raw = out->mutable_advantages_le();
  if (raw == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("loss_fn_inputs.", Quoted(name), " is not offered"));
  }
  WEFT_ASSIGN_OR_RETURN(const std::vector<float> values,
                        ReadFloats(name, tensor));
  *raw = RawFloats(values);
  return absl::OkStatus();
}

// Returns the values of all sparse tensors, when they are dense. A number above
// kMaxDenseValues need not be exact.
int64_t NumDenseValues(const ForwardBackwardRequest& in) {
  int64_t values = 0;
  for (const Datum& datum : in.data()) {
    for (const auto& [name, tensor] : datum.loss_fn_inputs()) {
      if (tensor.has_sparse_csr()) values += NumValues(tensor);
      if (values > kMaxDenseValues) return values;
    }
  }
  return values;
}

// Returns an error unless each sparse tensor has a row for each token. The
// result's shapes are then bounded by the tokens that the client sent.
absl::Status CheckRows(const Datum& in, const v1::Datum& out) {
  const auto tokens =
      static_cast<int64_t>(out.tokens_le().size() / sizeof(uint32_t));
  for (const auto& [name, tensor] : in.loss_fn_inputs()) {
    if (!tensor.has_sparse_csr() || tensor.shape_size() == 0 ||
        tensor.shape(0) == tokens) {
      continue;
    }
    return BadField(absl::StrCat("loss_fn_inputs.", Quoted(name)),
                    absl::StrCat("has ", tensor.shape(0),
                                 " rows, must have one for each of the ",
                                 tokens, " tokens"));
  }
  return absl::OkStatus();
}

absl::Status ReadDatum(const Datum& in, bool is_gspo, v1::Datum* out) {
  WEFT_RETURN_IF_ERROR(ReadTokens(in, out));
  WEFT_RETURN_IF_ERROR(CheckRows(in, *out));
  for (const auto& [name, tensor] : in.loss_fn_inputs()) {
    WEFT_RETURN_IF_ERROR(ReadInput(name, tensor, out));
  }
  return is_gspo ? ReadMask(in, out) : absl::OkStatus();
}

}  // namespace

int64_t TranslationBytes(const ForwardBackwardRequest& in) {
  // A value is 8 bytes on the way, and 4 in the result.
  constexpr int64_t kValueBytes = 12;
  return 3 * static_cast<int64_t>(in.SpaceUsedLong()) +
         kValueBytes * std::min(NumDenseValues(in), kMaxDenseValues);
}

absl::StatusOr<v1::ForwardBackwardRequest> TranslateTrain(
    const ForwardBackwardRequest& in) {
  if (NumDenseValues(in) > kMaxDenseValues) {
    return BadField("data", absl::StrCat("has sparse tensors of more than ",
                                         kMaxDenseValues,
                                         " values together: send fewer data"));
  }
  v1::ForwardBackwardRequest out;
  WEFT_RETURN_IF_ERROR(ReadLoss(in, out.mutable_loss()));
  const bool is_gspo = out.loss().function() == v1::LOSS_FUNCTION_GSPO;
  for (int i = 0; i < in.data_size(); ++i) {
    const absl::Status read = ReadDatum(in.data(i), is_gspo, out.add_data());
    if (read.ok()) continue;
    return absl::Status(read.code(),
                        absl::StrCat("data[", i, "]: ", read.message()));
  }
  return out;
}

}  // namespace weft::tinker
