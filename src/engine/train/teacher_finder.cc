#include "src/engine/train/teacher_finder.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"

namespace weft::engine {
namespace {

// Says in the error which field names what does not exist.
absl::Status OfTeacher(const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("loss.teacher.", status.message()));
}

}  // namespace

absl::StatusOr<FoundTeacher> TeacherFinder::Borrow(
    AdapterKey key, const Teacher& teacher) const {
  AdapterTable& adapters = context_.adapters;
  const absl::StatusOr<int64_t> bytes =
      adapters.CopyBytes(key, teacher.snapshot);
  if (!bytes.ok()) return OfTeacher(bytes.status());
  const bool replaying = context_.recorder.replaying();
  const int64_t budget = context_.options.memory_budget_bytes;
  if (budget > 0 && *bytes > budget && !replaying) {
    return OfTeacher(absl::ResourceExhaustedError(
        absl::StrCat("adapter_id: adapter '", teacher.adapter_id,
                     "' is not on the device, and a copy of its weights takes ",
                     *bytes, " bytes. --memory-budget has ", budget,
                     ": raise it or --max-resident-adapters")));
  }
  lora::AdapterImage image = adapters.Image(key);
  if (!adapters.File(key).name.empty()) {
    WEFT_RETURN_IF_ERROR(mover_.Read(key, image));
  }
  absl::StatusOr<lora::AdapterVersionPtr> version;
  WEFT_RETURN_IF_ERROR(context_.guard.Guarded("reading a teacher", [&] {
    version = adapters.Borrow(key, teacher.snapshot, image);
  }));
  if (!version.ok()) return OfTeacher(version.status());
  return FoundTeacher{.version = *std::move(version),
                      .copy_bytes = replaying ? 0 : *bytes};
}

absl::StatusOr<FoundTeacher> TeacherFinder::Find(const StepTask& step) const {
  const auto& request = std::get<TrainRequest>(*step.request);
  const Teacher& teacher = request.loss.teacher;
  if (teacher.base_model) return FoundTeacher();
  const std::optional<AdapterKey> key =
      context_.dispatcher.adapters().KeyOf(teacher.adapter_id);
  if (!key) return OfTeacher(dispatch::NoSuchAdapter(teacher.adapter_id));
  if (request.backward && !context_.recorder.CanReplay(step.adapter, *key)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "loss.teacher.adapter_id: adapter '", teacher.adapter_id,
        "' has durability memory, so that a restart could not run this step of "
        "an adapter of durability step again. Save the teacher and load it "
        "with durability step"));
  }
  if (context_.adapters.Find(*key) == nullptr) {
    return Borrow(*key, teacher);
  }
  auto version = context_.adapters.Version(*key, teacher.snapshot);
  if (!version.ok()) return OfTeacher(version.status());
  return FoundTeacher{.version = *std::move(version)};
}

}  // namespace weft::engine
