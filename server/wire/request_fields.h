// The table of what each request names, and what it costs. Isolation
// (caller.h), the quota and the audit log (call.h) know a request only through
// this table. So a request type without a row does not compile.
#ifndef WEFT_SERVER_WIRE_REQUEST_FIELDS_H_
#define WEFT_SERVER_WIRE_REQUEST_FIELDS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "src/request/activity.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/profile.h"
#include "src/request/sample.h"
#include "src/request/step.h"
#include "src/request/train.h"

namespace weft::server {

// The pointers point into the request. A null pointer means that the request
// has no such field.
struct RequestFields {
  // The names of adapters. Caller::Qualify replaces them, if not empty, by the
  // engine's names. Audit lines have `adapter_id`.
  std::string* adapter_id = nullptr;
  // An empty `adapter_id` stands for all adapters. The engine's name for those
  // of a tenant is the beginning of their names.
  bool all_if_empty = false;
  std::string* source_adapter_id = nullptr;
  // The tenant of an adapter that the request may create.
  std::string* tenant = nullptr;
  // Gets the caller's tenant.
  std::string* caller = nullptr;
  // A request for a list of adapters.
  ListAdaptersRequest* list = nullptr;
  // The checkpoint in audit lines, after the adapter.
  const std::string* checkpoint = nullptr;
  // Gets the deadline of the call.
  absl::Time* deadline = nullptr;
  // The tokens that count against the tenant's rate.
  int64_t cost = 0;
  // At most how many bytes of memory the result takes, for requests of a few
  // bytes whose results may be large: the tokens, the lists of likely tokens
  // and of supports, and the tokens with experts. The last two are for what
  // samples need while they run: changes of logits, and tables with a bit for
  // each token of the vocabulary.
  int64_t token_bytes = 0;
  int64_t list_bytes = 0;
  int64_t routed_tokens = 0;
  int64_t edit_bytes = 0;
  int64_t vocab_tables = 0;
};

RequestFields FieldsOf(TrainRequest* request);
RequestFields FieldsOf(OptimStepRequest* request);
RequestFields FieldsOf(SampleRequest* request);
RequestFields FieldsOf(CreateAdapterRequest* request);
RequestFields FieldsOf(ListAdaptersRequest* request);
RequestFields FieldsOf(SaveCheckpointRequest* request);
RequestFields FieldsOf(LoadCheckpointRequest* request);
RequestFields FieldsOf(UploadCheckpointRequest* request);
RequestFields FieldsOf(SetCheckpointTtlRequest* request);
RequestFields FieldsOf(PublishSnapshotRequest* request);
RequestFields FieldsOf(RefusedStep* request);
RequestFields FieldsOf(ReleaseSnapshotRequest* request);
RequestFields FieldsOf(MoveAdapterRequest* request);
RequestFields FieldsOf(MetricReport* report);
RequestFields FieldsOf(ExportAdapterRequest* request);
RequestFields FieldsOf(ImportAdapterRequest* request);
RequestFields FieldsOf(ProfileRequest* request);
// For an adapter's id, and for an adapter's id with a checkpoint's name.
RequestFields FieldsOf(std::string* adapter_id);
RequestFields FieldsOf(std::pair<std::string, std::string>* checkpoint);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_REQUEST_FIELDS_H_
