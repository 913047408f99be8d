#include "server/tinker/errors.h"

namespace weft::server::tinker {
namespace {

constexpr FieldName kClientsNames[] = {
    {"adapter_id", "model_id"},
    {"adamw", "adam_params"},
    {"adamw.max_grad_norm", "adam_params.grad_clip_norm"},
    {"checkpoint", "model_path"},
    {"config.max_tokens", "sampling_params.max_tokens"},
    {"config.rank", "lora_config.rank"},
    {"config.stop", "sampling_params.stop"},
    {"config.stop.byte_strings", "sampling_params.stop"},
    {"config.stop.token_ids", "sampling_params.stop"},
    {"config.temperature", "sampling_params.temperature"},
    {"config.top_p", "sampling_params.top_p"},
    {"data.advantages", "data[].loss_fn_inputs.advantages"},
    {"data.custom_inputs", "data[].loss_fn_inputs"},
    {"data.logprobs", "data[].loss_fn_inputs.logprobs"},
    {"data.sampled_spans", "data[].loss_fn_input_spans"},
    {"data.targets", "data[].loss_fn_inputs.target_tokens"},
    {"data.targets_per_token", "data[].loss_fn_inputs.target_tokens.shape[1]"},
    {"data.tokens", "data[].model_input"},
    {"data.tokens_le", "data[].model_input"},
    {"data.weights", "data[].loss_fn_inputs.weights"},
    {"loss.beta", "loss_fn_config.beta"},
    {"loss.clip_high", "loss_fn_config.clip_high_threshold"},
    {"loss.clip_low", "loss_fn_config.clip_low_threshold"},
    {"loss.custom_loss", "create_custom_loss"},
    {"muon", "optimizer_params"},
    {"muon.max_grad_norm", "optimizer_params.grad_clip_norm"},
    {"muon.momentum", "optimizer_params.beta1"},
    {"prompt_alternatives", "prompt_alt_tokens_k"},
    {"prompt_targets", "target_prompt_logprobs"},
    {"prompt_top_logprobs", "topk_prompt_logprobs"},
    {"source_adapter_id", "path"},
    {"top_logprobs", "topk_sample_logprobs"}};

}  // namespace

absl::Span<const FieldName> ClientsNames() { return kClientsNames; }

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
