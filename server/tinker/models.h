// Models: made, described, unloaded; a model is an adapter of Weft's.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_MODELS_H_
#define WEFT_SERVER_TINKER_MODELS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// "SESSION:train:3" is the adapter "SESSION.train.3"; any other adapter is the
// model of its own name.
[[nodiscard]] std::string AdapterOfModel(absl::string_view model_id);
[[nodiscard]] std::string ModelOfAdapter(absl::string_view adapter_id);

// UNIMPLEMENTED when `base_model` is not the one that the server runs. Also a
// name of which that is the last part counts, as "owner/name" has it.
[[nodiscard]] absl::Status CheckBaseModel(const Front& front,
                                          absl::string_view base_model);
// UNIMPLEMENTED unless the body's optimizer is AdamW.
[[nodiscard]] absl::Status CheckOptimizer(const Json& body);

// The model that `session_id` and `model_seq_id` of the body name, put on
// record. The same one if it is there.
[[nodiscard]] absl::StatusOr<Model*> OpenModel(Front& front, const Call& call);
[[nodiscard]] absl::Status KeepModel(Front& front, const Model& model);

[[nodiscard]] absl::Status CreateModel(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status GetModelInfo(Front& front, const CallPtr& call,
                                        const Respond& respond);
[[nodiscard]] absl::Status UnloadModel(Front& front, const CallPtr& call,
                                       const Respond& respond);

// Deletes the adapters of a session's models.
void UnloadModelsOf(Front& front, const std::string& session);

// Takes up the models of the ledger; sessions are there already.
void RestoreModels(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_MODELS_H_
