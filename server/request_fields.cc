#include "server/request_fields.h"

namespace weft {

RequestFields FieldsOf(TrainRequest* request) {
  return {.adapter_id = &request->adapter_id,
          .deadline = &request->deadline,
          .cost = request->num_tokens()};
}

RequestFields FieldsOf(OptimStepRequest* request) {
  return {.adapter_id = &request->adapter_id, .deadline = &request->deadline};
}

RequestFields FieldsOf(SampleRequest* request) {
  return {.adapter_id = &request->adapter_id,
          .deadline = &request->deadline,
          .cost = static_cast<int64_t>(request->prompt.size()) +
                  int64_t{request->num_samples} * request->config.max_tokens};
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
