// Models: made, described, unloaded; a model is an adapter of Weft's.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_MODELS_H_
#define WEFT_SERVER_TINKER_MODELS_H_

#include <functional>
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

// Makes the model that `session_id` and `model_seq_id` of the body name, unless
// it is there, and calls `then` with its id when it is on record. An error that
// `then` returns is the response.
[[nodiscard]] absl::Status OpenModel(
    Front& front, const CallPtr& call, const Respond& respond,
    std::function<absl::Status(const std::string& id)> then);
// Puts it on record; `done` is told when that is on disk.
void KeepModel(Front& front, const Model& model,
               std::function<void(absl::Status)> done);

[[nodiscard]] absl::Status CreateModel(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status GetModelInfo(Front& front, const CallPtr& call,
                                        const Respond& respond);
[[nodiscard]] absl::Status UnloadModel(Front& front, const CallPtr& call,
                                       const Respond& respond);

// Forgets a model with its futures and sampling sessions. Its adapter is gone,
// or goes by the reaper.
void ForgetModel(Front& front, const std::string& id);
// Forgets a session's models and has their adapters deleted.
void UnloadModelsOf(Front& front, const std::string& session);

// Takes up the models of the ledger; sessions are there already.
void RestoreModels(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_MODELS_H_
