#include "server/tinker/errors.h"

#include <array>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace weft::tinker {
namespace {

// Field names of weft.v1 and of the Tinker API. StrReplaceAll takes the longest
// name that fits.
using Name = std::pair<absl::string_view, absl::string_view>;
constexpr auto kNames = std::to_array<Name>(
    {{"].logprobs", "].loss_fn_inputs.logprobs"},
     {"].advantages", "].loss_fn_inputs.advantages"},
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
     {"loss.beta", "loss_fn_config.beta"},
     {"loss.clip_high", "loss_fn_config.clip_high_threshold"},
     {"loss.clip_low", "loss_fn_config.clip_low_threshold"},
     {"prompt_top_logprobs", "topk_prompt_logprobs"},
     {"source_adapter_id", "path"},
     {"top_logprobs", "topk_sample_logprobs"},
     {"use token_ids or token_sequences", "use token ids"}});

// Prints JSON. Replaces bytes that are not UTF-8, because the library would
// throw an exception for such bytes.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

absl::Status InClientsNames(const absl::Status& status) {
  absl::Status out(status.code(),
                   absl::StrReplaceAll(status.message(), kNames));
  status.ForEachPayload(
      [&out](absl::string_view type, const absl::Cord& value) {
        out.SetPayload(type, value);
      });
  return out;
}

int HttpStatusOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    // The usual HTTP statuses for these two codes are 409 and 501. But the SDK
    // repeats a request after 409 and 501, so both codes become 400.
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kAborted:
      return 410;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

HttpReply JsonReply(const Json& body, int status) {
  return {.status = status, .body = Dump(body)};
}

HttpReply ErrorReply(const absl::Status& status) {
  HttpReply reply = JsonReply({{"detail", std::string(status.message())}},
                              HttpStatusOf(status));
  if (reply.status == 429 || reply.status == 503) reply.retry_after_seconds = 1;
  return reply;
}

const char* CategoryOf(const absl::Status& status) {
  switch (status.code()) {
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

Json FailureOf(const absl::Status& status) {
  return {{"error", std::string(status.message())},
          {"category", CategoryOf(status)}};
}

}  // namespace weft::tinker
