#include "server/wire/request_fields.h"

namespace weft::server {
namespace {

// What a token with its log-probability takes in a result and in the reply made
// of it, and what a list of likely tokens and each of its entries take besides.
constexpr int64_t kTokenBytes = 16;
constexpr int64_t kTopListBytes = 192;
constexpr int64_t kTopEntryBytes = 40;
// What a token takes besides if a version of its own has drawn it.
constexpr int64_t kSpanBytes = 96;

// So many prompt_targets cost as much as a token (sample_prefill.cc).
constexpr int64_t kTargetsPerToken = 64;

int64_t ListBytes(int64_t num_tokens, int top_logprobs) {
  if (top_logprobs == 0) return 0;
  return num_tokens * (kTopListBytes + kTopEntryBytes * top_logprobs);
}

// What an id of a support takes in a result that grows, and in the reply; with
// a record also there, in its note and in the log.
constexpr int64_t kSupportIdBytes = 12;
constexpr int64_t kRecordedIdBytes = 24;

// Returns what the supports take if each has as many ids as it may.
int64_t SupportBytes(const SampleRequest& request, int64_t num_drawn) {
  if (!request.has_support()) return 0;
  return num_drawn * request.draw_top_k() *
         (request.record.empty() ? kSupportIdBytes : kRecordedIdBytes);
}

// What the edit of a logit takes on the host and on the device: one that all
// samples of a request share, and one of a sample's own.
constexpr int64_t kSharedEditBytes = 64;
constexpr int64_t kOwnEditBytes = 160;

// Returns what the edits take if all samples run at the same time.
int64_t EditBytes(const SampleRequest& request) {
  const SamplingConfig& config = request.config;
  auto shared = static_cast<int64_t>(config.logit_bias.size());
  if (config.repetition_penalty != 1) {
    shared += static_cast<int64_t>(request.prompt.size());
  }
  const int64_t own = config.has_penalties() ? config.max_tokens : 0;
  return shared * kSharedEditBytes + request.num_samples * own * kOwnEditBytes;
}

int64_t RoutedTokens(const SampleRequest& request) {
  if (!request.return_routing) return 0;
  return request.num_samples * (static_cast<int64_t>(request.prompt.size()) +
                                request.config.max_tokens);
}

}  // namespace

RequestFields FieldsOf(TrainRequest* request) {
  return {.adapter_id = &request->adapter_id,
          .source_adapter_id = &request->loss.teacher.adapter_id,
          .caller = &request->tenant,
          .deadline = &request->deadline,
          .cost = request->num_tokens()};
}

RequestFields FieldsOf(OptimStepRequest* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(SampleRequest* request) {
  const auto prompt = static_cast<int64_t>(request->prompt.size());
  const int64_t drawn =
      int64_t{request->num_samples} * request->config.max_tokens;
  const bool scores_prompt =
      request->prompt_logprobs || request->prompt_top_logprobs > 0;
  // A draw costs as much at a position of the prompt as it does in a sample.
  const int64_t alternatives = prompt * request->prompt_alternatives;
  const int64_t targets =
      static_cast<int64_t>(request->prompt_targets.size()) / kTargetsPerToken;
  return {.adapter_id = &request->adapter_id,
          .caller = &request->tenant,
          .checkpoint =
              request->checkpoint.empty() ? nullptr : &request->checkpoint,
          .deadline = &request->deadline,
          .cost = prompt + drawn + alternatives + targets,
          .token_bytes = kTokenBytes * (drawn + (scores_prompt ? prompt : 0)) +
                         (request->in_flight ? kSpanBytes * drawn : 0),
          .list_bytes = ListBytes(drawn, request->top_logprobs) +
                        ListBytes(prompt, request->prompt_top_logprobs) +
                        ListBytes(prompt, request->prompt_alternatives) +
                        SupportBytes(*request, drawn) +
                        kTokenBytes * static_cast<int64_t>(
                                          request->prompt_targets.size()),
          .routed_tokens = RoutedTokens(*request),
          .edit_bytes = EditBytes(*request),
          .vocab_tables = request->config.allowed_token_ids.empty() &&
                                  request->config.min_tokens == 0
                              ? 0
                              : 2};
}

RequestFields FieldsOf(CreateAdapterRequest* request) {
  return {.adapter_id = &request->adapter_id, .tenant = &request->tenant};
}

RequestFields FieldsOf(ListAdaptersRequest* request) {
  return {.list = request};
}

RequestFields FieldsOf(SaveCheckpointRequest* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(LoadCheckpointRequest* request) {
  return {.adapter_id = &request->adapter_id,
          .source_adapter_id = &request->source_adapter_id,
          .tenant = &request->tenant,
          .deadline = &request->deadline};
}

RequestFields FieldsOf(UploadCheckpointRequest* request) {
  return {.adapter_id = &request->adapter_id, .tenant = &request->tenant};
}

RequestFields FieldsOf(SetCheckpointTtlRequest* request) {
  return {.adapter_id = &request->adapter_id, .checkpoint = &request->name};
}

RequestFields FieldsOf(PublishSnapshotRequest* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(RefusedStep* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(ReleaseSnapshotRequest* request) {
  return {.adapter_id = &request->adapter_id};
}

RequestFields FieldsOf(MoveAdapterRequest* request) {
  return {.adapter_id = &request->adapter_id};
}

RequestFields FieldsOf(MetricReport* report) {
  return {.adapter_id = &report->adapter_id};
}

RequestFields FieldsOf(ExportAdapterRequest* request) {
  return {.adapter_id = &request->adapter_id};
}

RequestFields FieldsOf(ImportAdapterRequest* request) {
  return {.adapter_id = &request->adapter_id, .tenant = &request->tenant};
}

RequestFields FieldsOf(ProfileRequest* /*request*/) { return {}; }

RequestFields FieldsOf(std::string* adapter_id) {
  return {.adapter_id = adapter_id, .all_if_empty = true};
}

RequestFields FieldsOf(std::pair<std::string, std::string>* checkpoint) {
  return {.adapter_id = &checkpoint->first, .checkpoint = &checkpoint->second};
}

}  // namespace weft::server
