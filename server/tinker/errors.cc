#include "server/tinker/errors.h"

#include <array>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace weft::server::tinker {
namespace {

// Field names of weft.v1 and of the Tinker API. StrReplaceAll takes the longest
// name that fits.
using Name = std::pair<absl::string_view, absl::string_view>;
constexpr auto kNamesOfFields = std::to_array<Name>(
    {{"].logprobs", "].loss_fn_inputs.logprobs"},
     {"].advantages", "].loss_fn_inputs.advantages"},
     {"].sampled_spans", "].loss_fn_input_spans"},
     {"].targets", "].loss_fn_inputs.target_tokens"},
     {"].targets_per_token", "].loss_fn_inputs.target_tokens.shape[1]"},
     {"].tokens", "].model_input"},
     {"].tokens_le", "].model_input"},
     {"].weights", "].loss_fn_inputs.weights"},
     {"adamw.", "adam_params."},
     {"adamw.max_grad_norm", "adam_params.grad_clip_norm"},
     {"adapter_id", "model_id"},
     {"config.max_tokens", "sampling_params.max_tokens"},
     {"config.rank", "lora_config.rank"},
     {"config.stop", "sampling_params.stop"},
     {"config.stop.byte_strings", "sampling_params.stop"},
     {"config.stop.token_ids", "sampling_params.stop"},
     {"config.temperature", "sampling_params.temperature"},
     {"config.top_p", "sampling_params.top_p"},
     {"].custom_inputs[", "].loss_fn_inputs["},
     {"custom_inputs[", "loss_fn_inputs["},
     {"loss.custom_loss.", "create_custom_loss."},
     {"loss.beta", "loss_fn_config.beta"},
     {"loss.clip_high", "loss_fn_config.clip_high_threshold"},
     {"loss.clip_low", "loss_fn_config.clip_low_threshold"},
     {"muon.", "optimizer_params."},
     {"muon.max_grad_norm", "optimizer_params.grad_clip_norm"},
     {"muon.momentum", "optimizer_params.beta1"},
     {"prompt_alternatives", "prompt_alt_tokens_k"},
     {"prompt_targets", "target_prompt_logprobs"},
     {"prompt_top_logprobs", "topk_prompt_logprobs"},
     {"source_adapter_id", "path"},
     {"top_logprobs", "topk_sample_logprobs"},
     {"use token_ids or token_sequences", "use token ids"}});

}  // namespace

absl::Status InClientsNames(const absl::Status& status) {
  absl::Status out(status.code(),
                   absl::StrReplaceAll(status.message(), kNamesOfFields));
  status.ForEachPayload(
      [&out](absl::string_view type, const absl::Cord& value) {
        out.SetPayload(type, value);
      });
  return out;
}

namespace {

const char* CategoryOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
      return "user";
    default:
      return "server";
  }
}

}  // namespace

Json FailureOf(const absl::Status& status) {
  return {{"error", std::string(status.message())},
          {"category", CategoryOf(status.code())}};
}

}  // namespace weft::server::tinker
