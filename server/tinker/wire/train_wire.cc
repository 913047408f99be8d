#include "server/tinker/wire/train_wire.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/http/replies.h"
#include "server/tinker/wire/fields.h"
#include "server/tinker/wire/tensor.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

constexpr char kCustom[] = "custom";
constexpr char kTargets[] = "target_tokens";

absl::StatusOr<v1::LossFunction> ReadLossName(const std::string& name) {
  static const auto* const kNames = new std::map<std::string, v1::LossFunction>{
      {"cross_entropy", v1::LOSS_FUNCTION_CROSS_ENTROPY},
      {"importance_sampling", v1::LOSS_FUNCTION_IMPORTANCE_SAMPLING},
      {"ppo", v1::LOSS_FUNCTION_PPO},
      {"cispo", v1::LOSS_FUNCTION_CISPO},
      {"dro", v1::LOSS_FUNCTION_DRO},
      {"gspo", v1::LOSS_FUNCTION_GSPO},
      {kStableReinforce, v1::LOSS_FUNCTION_STABLE_REINFORCE},
      {kCustom, v1::LOSS_FUNCTION_CUSTOM}};
  const auto found = kNames->find(name);
  if (found != kNames->end()) return found->second;
  return absl::UnimplementedError(
      absl::StrCat("loss_fn ", Quoted(name),
                   " is not offered: use cross_entropy, importance_sampling, "
                   "ppo, cispo, dro, gspo, stable_reinforce or custom"));
}

absl::Status ReadLossOption(const std::string& name, double value,
                            v1::LossConfig* loss) {
  if (name == "clip_low_threshold") {
    loss->set_clip_low(value);
  } else if (name == "clip_high_threshold") {
    loss->set_clip_high(value);
  } else if (name == "beta" || name == "kl_coeff") {
    loss->set_beta(value);
  } else {
    return absl::UnimplementedError(
        absl::StrCat("loss_fn_config.", Quoted(name),
                     " is not offered: use clip_low_threshold, "
                     "clip_high_threshold, beta or kl_coeff"));
  }
  return absl::OkStatus();
}

absl::Status ReadLoss(const ForwardBackwardRequest& in, v1::LossConfig* loss) {
  WEFT_ASSIGN_OR_RETURN(const v1::LossFunction function,
                        ReadLossName(in.loss_fn()));
  loss->set_function(function);
  // The SDK also expects logprobs of the prompt's tokens, which have weight 0.
  loss->set_score_all(true);
  if (function == v1::LOSS_FUNCTION_CUSTOM) return LossIdOf(in).status();
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
  out->set_weights_le(ToRaw(mask));
  return absl::OkStatus();
}

// Adds a span of sampled targets to `out`, as a part of the span before if it
// continues that one.
void AddSpan(const Span& tokens, size_t start, v1::Datum* out) {
  const auto offset = static_cast<uint32_t>(tokens.offset());
  const auto length = static_cast<uint32_t>(tokens.length());
  if (out->sampled_spans_size() > 0) {
    v1::SampledSpan& last = *out->mutable_sampled_spans()->rbegin();
    if (last.sequence_id() == tokens.sequence_id() &&
        last.start() + last.length() == start &&
        last.offset() + last.length() == offset) {
      last.set_length(last.length() + length);
      return;
    }
  }
  v1::SampledSpan* const to = out->add_sampled_spans();
  to->set_sequence_id(tokens.sequence_id());
  to->set_offset(offset);
  to->set_start(static_cast<uint32_t>(start));
  to->set_length(length);
}

// Adds the spans of sampled targets to `out`. Returns for each target 1 if it
// was sampled, or 0 if it is of a prompt.
absl::StatusOr<std::vector<float>> ReadSpans(const Datum& in, v1::Datum* out) {
  const size_t num_targets = out->targets_le().size() / sizeof(int32_t);
  std::vector<float> sampled;
  for (const ProvenanceSpan& span : in.loss_fn_input_spans()) {
    const bool drawn = span.has_sampled_tokens();
    const Span& tokens = drawn ? span.sampled_tokens() : span.prompt_tokens();
    const auto left = static_cast<int64_t>(num_targets - sampled.size());
    if (tokens.length() < 0 || tokens.length() > left) {
      return BadField(
          "loss_fn_input_spans",
          absl::StrCat("has a length of ", tokens.length(), ", must be in [0, ",
                       left, "], the targets that no span covers yet"));
    }
    WEFT_RETURN_IF_ERROR(CheckReal("loss_fn_input_spans.offset",
                                   static_cast<double>(tokens.offset()),
                                   {.high = std::numeric_limits<int>::max()}));
    if (drawn && tokens.length() > 0) AddSpan(tokens, sampled.size(), out);
    sampled.resize(sampled.size() + tokens.length(), drawn ? 1.0F : 0.0F);
  }
  if (sampled.size() == num_targets) return sampled;
  return BadField("loss_fn_input_spans",
                  absl::StrCat("covers ", sampled.size(), " of ", num_targets,
                               " targets, must cover all (the SDK's "
                               "datum.with_provenance)"));
}

// Gives weight 0 to the targets that no model has sampled. The ratio of a
// sequence must not count them: their `logprobs` are placeholders.
absl::Status WeighSampledOnly(const Datum& in, v1::Datum* out) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<float> sampled, ReadSpans(in, out));
  if (out->weights_le().empty()) {
    out->set_weights_le(ToRaw(sampled));
    return absl::OkStatus();
  }
  for (size_t i = 0; i < sampled.size(); ++i) {
    if (sampled[i] != 0) continue;
    const size_t at = i * sizeof(float);
    if (at < out->weights_le().size()) {
      out->mutable_weights_le()->replace(at, sizeof(float), sizeof(float), 0);
    }
  }
  return absl::OkStatus();
}

// Reads one tensor of loss_fn_inputs.
absl::Status ReadInput(const std::string& name, const Tensor& tensor,
                       v1::Datum* out) {
  // ReadMask reads this tensor for gspo. Other losses ignore it.
  if (name == "sequence_ratio_mask") return absl::OkStatus();
  if (name == kTargets) {
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
  *raw = ToRaw(values);
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

absl::Status ReadDatum(const Datum& in, v1::LossFunction loss, v1::Datum* out) {
  WEFT_RETURN_IF_ERROR(ReadTokens(in, out));
  WEFT_RETURN_IF_ERROR(CheckRows(in, *out));
  const bool is_custom = loss == v1::LOSS_FUNCTION_CUSTOM;
  for (const auto& [name, tensor] : in.loss_fn_inputs()) {
    if (is_custom) {
      WEFT_ASSIGN_OR_RETURN((*out->mutable_custom_inputs())[name],
                            ReadCustomInput(name, tensor));
    }
    if (is_custom && name != kTargets) continue;
    WEFT_RETURN_IF_ERROR(ReadInput(name, tensor, out));
  }
  if (loss == v1::LOSS_FUNCTION_STABLE_REINFORCE) {
    return WeighSampledOnly(in, out);
  }
  // Records have one target for each token.
  if (in.loss_fn_input_spans_size() > 0 && out->targets_per_token() <= 1) {
    WEFT_RETURN_IF_ERROR(ReadSpans(in, out).status());
  }
  return loss == v1::LOSS_FUNCTION_GSPO ? ReadMask(in, out) : absl::OkStatus();
}

// Fills `out` with the field `list` of result.data[begin, end), one datum after
// the other. `shape` is the number of targets per token of all these data.
void FillField(const TrainResult& result, size_t begin, size_t end,
               int64_t shape, std::vector<float> DatumResult::*list,
               BatchedTensor* out) {
  out->set_dtype(DTYPE_FLOAT32);
  if (shape > 0) out->add_trailing_shape(shape);
  std::vector<int64_t> offsets = {0};
  for (size_t i = begin; i < end; ++i) {
    out->mutable_data()->append(ToRaw(result.data[i].*list));
    offsets.push_back(static_cast<int64_t>(out->data().size()));
  }
  out->set_offsets(ToRaw(offsets));
}

absl::Status ReadInputs(const Json& json, Datum* out) {
  WEFT_ASSIGN_OR_RETURN(const Json* const inputs,
                        Object(json, "loss_fn_inputs"));
  for (const auto& [name, value] : inputs->items()) {
    WEFT_ASSIGN_OR_RETURN((*out->mutable_loss_fn_inputs())[name],
                          TensorFromJson(name, value));
  }
  return absl::OkStatus();
}

absl::Status ReadData(const Json& input, ForwardBackwardRequest* out) {
  WEFT_ASSIGN_OR_RETURN(const Json* const data, List(input, "data", "data"));
  for (const Json& entry : *data) {
    if (!entry.is_object()) return BadField("data", "must have objects");
    Datum* const datum = out->add_data();
    WEFT_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          ReadModelInput(entry, "model_input"));
    datum->add_model_input()->mutable_encoded_text()->set_tokens(ToRaw(tokens));
    WEFT_RETURN_IF_ERROR(ReadInputs(entry, datum));
  }
  return absl::OkStatus();
}

absl::Status ReadConfig(const Json& input, ForwardBackwardRequest* out) {
  if (Find(input, "loss_fn_config") == nullptr) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const Json* const config,
                        Object(input, "loss_fn_config"));
  for (const auto& [name, value] : config->items()) {
    LossConfigValue& read = (*out->mutable_loss_fn_config_v2())[name];
    if (value.is_number()) {
      read.set_number(value.get<double>());
    } else if (value.is_string()) {
      read.set_text(value.get<std::string>());
    } else {
      return BadField(absl::StrCat("loss_fn_config.", Quoted(name)),
                      "must be a number or a text");
    }
  }
  return absl::OkStatus();
}

// Returns the part of `tensor` that belongs to datum `i` as JSON.
Json TensorJson(const BatchedTensor& tensor, size_t i) {
  const auto offsets = FromRaw<int64_t>(tensor.offsets().substr(8 * i, 16));
  const auto data = FromRaw<float>(
      tensor.data().substr(static_cast<size_t>(offsets[0]),
                           static_cast<size_t>(offsets[1] - offsets[0])));
  Json shape = {static_cast<int64_t>(data.size())};
  for (const int64_t size : tensor.trailing_shape()) {
    shape[0] = shape[0].get<int64_t>() / size;
    shape.push_back(size);
  }
  return {{"data", data}, {"dtype", "float32"}, {"shape", shape}};
}

}  // namespace

absl::StatusOr<std::string> LossIdOf(const ForwardBackwardRequest& in) {
  if (in.loss_fn() != kCustom) return "";
  const auto& config = in.loss_fn_config_v2();
  const auto found = config.find("loss_id");
  const bool alone = config.size() + in.loss_fn_config().size() == 1;
  if (found != config.end() && found->second.has_text() && alone) {
    return found->second.text();
  }
  return BadField("loss_fn_config",
                  "must have loss_id alone, as create_custom_loss returned it, "
                  "for the loss_fn custom");
}

int64_t TranslationBytes(const ForwardBackwardRequest& in) {
  // A value is 8 bytes on the way, and 4 in the result, or 8 as an input of a
  // custom loss.
  constexpr int64_t kValueBytes = 16;
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
  for (int i = 0; i < in.data_size(); ++i) {
    const absl::Status read =
        ReadDatum(in.data(i), out.loss().function(), out.add_data());
    if (read.ok()) continue;
    return absl::Status(read.code(),
                        absl::StrCat("data[", i, "]: ", read.message()));
  }
  const bool has_spans = std::any_of(
      out.data().begin(), out.data().end(),
      [](const auto& datum) { return datum.sampled_spans_size() > 0; });
  out.mutable_loss()->set_replay_logprobs(has_spans);
  out.mutable_loss()->set_replay_support(has_spans);
  return out;
}

std::string TrainOutput(const TrainResult& result) {
  ForwardBackwardOutput out;
  out.set_loss_fn_output_type("ArrayRecord");
  // Each record holds adjacent data whose targets have the same shape.
  const std::vector<DatumResult>& data = result.data;
  for (size_t begin = 0; begin < data.size();) {
    const int shape = data[begin].targets_per_token;
    size_t end = begin + 1;
    while (end < data.size() && data[end].targets_per_token == shape) ++end;
    ArrayRecord* const record = out.add_loss_fn_outputs();
    record->set_type_tag("ArrayRecord");
    record->set_num_datums(static_cast<int64_t>(end - begin));
    auto* const fields = record->mutable_fields();
    FillField(result, begin, end, shape, &DatumResult::logprobs,
              &(*fields)["logprobs"]);
    FillField(result, begin, end, shape, &DatumResult::losses,
              &(*fields)["elementwise_loss"]);
    begin = end;
  }
  out.mutable_metrics()->insert(result.metrics.begin(), result.metrics.end());
  return out.SerializeAsString();
}

absl::StatusOr<ForwardBackwardRequest> TrainFromJson(const Json& body) {
  ForwardBackwardRequest out;
  const char* const key = Find(body, "forward_input") != nullptr
                              ? "forward_input"
                              : "forward_backward_input";
  WEFT_ASSIGN_OR_RETURN(const Json* const input, Object(body, key));
  WEFT_ASSIGN_OR_RETURN(*out.mutable_model_id(), Text(body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t number, Int(body, "seq_id"));
  if (number < 0 || number > std::numeric_limits<int32_t>::max()) {
    return BadField("seq_id", "must be in [0, 2147483648)");
  }
  out.set_seq_id(static_cast<int32_t>(number));
  out.set_forward_only(Find(body, "forward_input") != nullptr);
  WEFT_ASSIGN_OR_RETURN(*out.mutable_loss_fn(), Text(*input, "loss_fn"));
  WEFT_RETURN_IF_ERROR(ReadData(*input, &out));
  WEFT_RETURN_IF_ERROR(ReadConfig(*input, &out));
  return out;
}

std::string TrainOutputJson(const std::string& serialized) {
  ForwardBackwardOutput output;
  output.ParseFromString(serialized);
  Json outputs = Json::array();
  for (const ArrayRecord& record : output.loss_fn_outputs()) {
    for (int64_t i = 0; i < record.num_datums(); ++i) {
      Json datum = Json::object();
      for (const auto& [name, tensor] : record.fields()) {
        datum[name] = TensorJson(tensor, static_cast<size_t>(i));
      }
      outputs.push_back(std::move(datum));
    }
  }
  Json metrics = Json::object();
  for (const auto& [name, value] : output.metrics()) metrics[name] = value;
  return JsonReply({{"loss_fn_output_type", output.loss_fn_output_type()},
                    {"loss_fn_outputs", std::move(outputs)},
                    {"metrics", std::move(metrics)}})
      .body;
}

}  // namespace weft::server::tinker
