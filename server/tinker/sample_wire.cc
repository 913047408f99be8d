#include "server/tinker/sample_wire.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/request_validation.h"
#include "server/tinker/model_input.h"
#include "server/tinker/refusals.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

absl::Status ReadStop(const Json& params, v1::SamplingConfig* out) {
  const Json* const stop = Find(params, "stop");
  // Without `stop`, the model's end-of-sequence tokens stop a sample. With
  // `stop`, only the entries of `stop` do.
  if (stop == nullptr) return absl::OkStatus();
  v1::StopRule* const rule = out->mutable_stop();
  rule->set_ignore_eos(true);
  if (stop->is_string()) {
    rule->add_byte_strings(stop->get<std::string>());
    return absl::OkStatus();
  }
  if (!stop->is_array()) return BadField("stop", "must be a text or a list");
  for (const Json& entry : *stop) {
    if (entry.is_string()) {
      rule->add_byte_strings(entry.get<std::string>());
      continue;
    }
    WEFT_ASSIGN_OR_RETURN(const auto id,
                          Int32List(Json::array({entry}), "stop"));
    rule->add_token_ids(static_cast<uint32_t>(id[0]));
  }
  return absl::OkStatus();
}

absl::Status ReadParams(const Json& params, int64_t room,
                        v1::SamplingConfig* out) {
  WEFT_ASSIGN_OR_RETURN(
      const int64_t max_tokens,
      IntOr(params, "max_tokens", std::max<int64_t>(1, room)));
  WEFT_RETURN_IF_ERROR(CheckReal("max_tokens", static_cast<double>(max_tokens),
                                 {.low = 1, .high = 1e9}));
  out->set_max_tokens(static_cast<uint32_t>(max_tokens));
  WEFT_ASSIGN_OR_RETURN(const auto temperature,
                        NumberIfAny(params, "temperature"));
  if (temperature) out->set_temperature(*temperature);
  WEFT_ASSIGN_OR_RETURN(const auto top_p, NumberIfAny(params, "top_p"));
  if (top_p) out->set_top_p(*top_p);
  WEFT_ASSIGN_OR_RETURN(const int64_t top_k, IntOr(params, "top_k", -1));
  if (top_k < -1 || top_k > 1'000'000'000) {
    return BadField("top_k", "must be -1 or the number of tokens to draw from");
  }
  out->set_top_k(static_cast<uint32_t>(std::max<int64_t>(0, top_k)));
  const Json* const seed = Find(params, "seed");
  if (seed != nullptr) {
    if (!seed->is_number_integer()) {
      return BadField("seed", "must be a whole number");
    }
    out->set_seed(seed->get<uint64_t>());
  }
  return ReadStop(params, out);
}

absl::StatusOr<int64_t> ReadLastN(const Json& body, int64_t prompt_tokens) {
  WEFT_ASSIGN_OR_RETURN(const int64_t last_n,
                        IntOr(body, "prompt_logprobs_last_n", prompt_tokens));
  if (last_n >= 1) return last_n;
  return BadField("prompt_logprobs_last_n", "must be at least 1");
}

}  // namespace

absl::StatusOr<TranslatedSample> TranslateSample(const Json& body,
                                                 int context_length) {
  WEFT_RETURN_IF_ERROR(RefuseFields(body));
  TranslatedSample out;
  WEFT_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt,
                        ReadModelInput(body, "prompt"));
  if (prompt.empty()) {
    return BadField("prompt", "is empty, must have at least one token");
  }
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  out.request.mutable_prompt()->Add(prompt.begin(), prompt.end());
  WEFT_ASSIGN_OR_RETURN(const int64_t num_samples,
                        IntOr(body, "num_samples", 1));
  WEFT_RETURN_IF_ERROR(CheckReal("num_samples",
                                 static_cast<double>(num_samples),
                                 {.low = 1, .high = 1e9}));
  out.request.set_num_samples(static_cast<uint32_t>(num_samples));
  WEFT_ASSIGN_OR_RETURN(const bool prompt_logprobs,
                        BoolOr(body, "prompt_logprobs", false));
  out.request.set_prompt_logprobs(prompt_logprobs);
  WEFT_ASSIGN_OR_RETURN(const int64_t top,
                        IntOr(body, "topk_sample_logprobs", 0));
  WEFT_RETURN_IF_ERROR(CheckReal("topk_sample_logprobs",
                                 static_cast<double>(top), {.high = 1e9}));
  out.request.set_top_logprobs(static_cast<uint32_t>(top));
  WEFT_ASSIGN_OR_RETURN(out.format.last_n, ReadLastN(body, prompt_tokens));
  WEFT_ASSIGN_OR_RETURN(out.format.prompt_top,
                        IntOr(body, "topk_prompt_logprobs", 0));
  WEFT_RETURN_IF_ERROR(CheckReal("topk_prompt_logprobs",
                                 static_cast<double>(out.format.prompt_top),
                                 {.high = kMaxTopLogprobs}));
  out.request.set_prompt_top_logprobs(
      static_cast<uint32_t>(out.format.prompt_top));
  WEFT_ASSIGN_OR_RETURN(const Json* const params,
                        ObjectField(body, "sampling_params"));
  WEFT_RETURN_IF_ERROR(ReadParams(*params, context_length - prompt_tokens,
                                  out.request.mutable_config()));
  return out;
}

}  // namespace weft::tinker
