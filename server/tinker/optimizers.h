// The optimizers of models: AdamW, and Weft's Muon as the Tinker API's Dimuon.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_OPTIMIZERS_H_
#define WEFT_SERVER_TINKER_OPTIMIZERS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "server/tinker/front.h"
#include "weft/v1/training.pb.h"

namespace weft::server::tinker {

// The types of `optimizer_config`.
inline constexpr char kAdamType[] = "adamw";
inline constexpr char kDimuonType[] = "dimuon";

// Convert between the engine's optimizer and the type. An empty type is AdamW.
std::string TypeOf(Optimizer optimizer);
Optimizer OptimizerOf(absl::string_view type);
// Returns an `optimizer_config` of the type.
Json OptimizerJson(const std::string& type);

// Returns the type of the optimizer with which the body's model trains, or an
// empty string if the body loads a checkpoint with its optimizer, which then is
// the model's. Without `optimizer_config` it is AdamW. Errors: UNIMPLEMENTED
// for other types; INVALID_ARGUMENT if a field is malformed, or given although
// the checkpoint's optimizer is loaded.
absl::StatusOr<std::string> ReadOptimizer(const Json& body);

// Reads `adam_params` or `optimizer_params` of an optim_step. Errors:
// UNIMPLEMENTED for a type that is not offered; INVALID_ARGUMENT for both, for
// a field that Dimuon does not have, and for values that are no numbers.
absl::Status ReadOptimizerParams(const Json& body, v1::OptimStepRequest* out);

// Returns FAILED_PRECONDITION if the model trains with another optimizer than
// that of the step.
absl::Status CheckOptimizerOf(const Model& model,
                              const v1::OptimStepRequest& step);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_OPTIMIZERS_H_
