// Makes, describes and unloads models. A model is an adapter of Weft.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_MODELS_H_
#define WEFT_SERVER_TINKER_MODELS_H_

#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// Convert between a model's id and its adapter's name: the model
// "SESSION:train:3" is the adapter "SESSION.train.3". Any other adapter has its
// own name as the model's id.
// Threads: any.
[[nodiscard]] std::string AdapterOfModel(absl::string_view model_id);
[[nodiscard]] std::string ModelOfAdapter(absl::string_view adapter_id);

// Returns UNIMPLEMENTED unless the server runs `base_model`: it must be the
// served model's name, or end in "/" and that name.
[[nodiscard]] absl::Status CheckBaseModel(const Front& front,
                                          absl::string_view base_model);
// Returns UNIMPLEMENTED if the body asks for another optimizer than AdamW;
// INVALID_ARGUMENT if the field is malformed.
[[nodiscard]] absl::Status CheckOptimizer(const Json& body);

// Begins to make a model's adapter. If it returns an error, nothing has begun
// and `done` does not run.
using ModelStart = std::function<absl::Status(const Model& model,
                                              Callback<FutureResult> done)>;
// Makes the entry of the model that `session_id` and `model_seq_id` of the body
// name, writes it to the ledger, promises a future, and runs `start`. The
// model's steps wait for its end, also after a restart. If it fails, they fail,
// too, because there is no adapter. Errors: INVALID_ARGUMENT; NOT_FOUND if
// there is no such session; FAILED_PRECONDITION if the caller has too many
// models.
[[nodiscard]] absl::Status MakeModel(Front& front, const CallPtr& call,
                                     const Respond& respond,
                                     const ModelStart& start);
// Writes the model to the ledger. `done` runs when it is on disk, or with the
// error.
void KeepModel(Front& front, const Model& model,
               std::function<void(absl::Status)> done);

// Handle create_model, get_info and unload_model. create_model and unload_model
// promise a future.
[[nodiscard]] absl::Status CreateModel(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status GetModelInfo(Front& front, const CallPtr& call,
                                        const Respond& respond);
[[nodiscard]] absl::Status UnloadModel(Front& front, const CallPtr& call,
                                       const Respond& respond);

// Forgets a model and its sampling sessions, and fails the futures of its steps
// that have not ended. The caller deletes the adapter, or has it reaped.
void ForgetModel(Front& front, const std::string& id);
// Forgets a session's models and has their adapters reaped.
void UnloadModelsOf(Front& front, const std::string& session);

// Reads the models of the ledger; call it after RestoreSessions. Models without
// a session are deleted. It waits for the disk.
void RestoreModels(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_MODELS_H_
