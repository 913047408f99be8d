#include "server/request_fields.h"

namespace weft {
namespace {

// A likely token with its log-probability: in the engine, in the message and in
// its bytes, as measured.
constexpr int64_t kLikelyTokenBytes = 40;

}  // namespace

RequestFields FieldsOf(TrainRequest* request) {
  return {.adapter_id = &request->adapter_id,
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
  return {.adapter_id = &request->adapter_id,
          .deadline = &request->deadline,
          .cost = prompt + drawn,
          .result_bytes =
              kLikelyTokenBytes * (drawn * request->top_logprobs +
                                   prompt * request->prompt_top_logprobs)};
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

RequestFields FieldsOf(PublishSnapshotRequest* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(RefusedStep* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(ReleaseSnapshotRequest* request) {
  return {.adapter_id = &request->adapter_id};
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

}  // namespace weft
