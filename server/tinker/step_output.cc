#include "server/tinker/step_output.h"

#include <variant>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/train_wire.h"

namespace weft::tinker {
namespace {

constexpr char kSnapshotPrefix[] = "sample-";

const char* TypeOfSave(CheckpointKind kind) {
  switch (kind) {
    case CheckpointKind::kTraining:
      return "save_weights";
    case CheckpointKind::kSampler:
      return "save_weights_for_sampler";
    case CheckpointKind::kExternal:
      return "save_weights_external";
  }
  return "";
}

}  // namespace

std::string SamplerId(absl::string_view session, int64_t number) {
  return absl::StrCat(session, ":sample:", number);
}

std::string SnapshotName(int64_t number) {
  return absl::StrCat(kSnapshotPrefix, number);
}

FutureResult OutputOf(absl::string_view /*model*/, const TrainResult& result) {
  return {.body = TrainOutput(result), .to_json = TrainOutputJson};
}

FutureResult OutputOf(absl::string_view /*model*/,
                      const OptimStepResult& result) {
  return FutureResult::Of({{"metrics", {{"grad_norm", result.grad_norm}}}});
}

FutureResult OutputOf(absl::string_view model, const CheckpointInfo& result) {
  const CheckpointPath path = PathOfWeft(model, result.name);
  return FutureResult::Of(
      {{"path", path.ToString()}, {"type", TypeOfSave(path.kind)}});
}

FutureResult OutputOf(absl::string_view model, const AdapterInfo& /*result*/) {
  return FutureResult::Of({{"model_id", model}, {"type", "load_weights"}});
}

FutureResult OutputOf(absl::string_view model,
                      const PublishedSnapshot& result) {
  const absl::string_view session = model.substr(0, model.find(':'));
  int64_t number = 0;  // PublishSampler has named the snapshot (SnapshotName).
  (void)absl::SimpleAtoi(absl::StripPrefix(result.name, kSnapshotPrefix),
                         &number);
  return FutureResult::Of(
      {{"type", "save_weights_for_sampler"},
       {"path", nullptr},
       {"sampling_session_id", SamplerId(session, number)}});
}

FutureResult OutputOf(absl::string_view model, const Caller& caller,
                      const StepResult& result) {
  return std::visit(
      [&](const auto& kind) {
        if constexpr (std::is_same_v<std::decay_t<decltype(kind)>,
                                     StepFailure>) {
          return FutureResult::Failed(caller.RevealError(kind.status));
        } else {
          return OutputOf(model, kind);
        }
      },
      result);
}

}  // namespace weft::tinker
