// Makes, describes and unloads models. A model is an adapter of Weft.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_MODELS_H_
#define WEFT_SERVER_TINKER_MODELS_H_

#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// The sequence number of the request that makes a model.
inline constexpr int64_t kCreateSeq = 0;

// Convert between a model's id and its adapter's name: the model
// "SESSION:train:3" is the adapter "SESSION.train.3", where SESSION is an id of
// 32 characters. For all other adapters, the model's id is the adapter's name.
// Threads: any.
[[nodiscard]] std::string AdapterOfModel(absl::string_view model_id);
[[nodiscard]] std::string ModelOfAdapter(absl::string_view adapter_id);

// Returns UNIMPLEMENTED if the server does not run `base_model`. `base_model`
// must be one of Front::model_names, or end in "/" and such a name. Upper and
// lower case are equal.
[[nodiscard]] absl::Status CheckBaseModel(const Front& front,
                                          absl::string_view base_model);

// Begins to make a model's adapter, and gives the result to `done`. If a
// ModelStart returns an error, nothing has begun and `done` does not run.
using ModelStart = std::function<absl::Status(const Model& model,
                                              Callback<FutureResult> done)>;
// Makes the model that `session_id` and `model_seq_id` of the body name. Writes
// the model to the ledger, runs `start`, and promises a future for its result.
// The model's steps wait until the work of `start` has ended, also after a
// restart. Errors: INVALID_ARGUMENT; NOT_FOUND if there is no such session;
// FAILED_PRECONDITION if the owner has too many models; those of Promise.
[[nodiscard]] absl::Status MakeModel(Front& front, const CallPtr& call,
                                     const Respond& respond,
                                     const ModelStart& start);
// Writes the model to the ledger. `done` gets the outcome after the write.
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

// Forgets a model and the sampling sessions of its snapshots. Fails the futures
// of the steps in Model::line. The caller of ForgetModel must delete the
// adapter, or have it deleted by DeleteOrphan, which fails its other steps.
void ForgetModel(Front& front, const std::string& id);
// Forgets a session's models, and has their adapters deleted by DeleteOrphan.
void UnloadModelsOf(Front& front, const std::string& session);

// Reads the models from the ledger. Deletes models that have no session. Call
// it after RestoreSessions.
void RestoreModels(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_MODELS_H_
