#include "src/engine/teacher_finder.h"

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::engine {
namespace {

// Says in the error which field names what does not exist.
absl::Status OfTeacher(const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("loss.teacher.", status.message()));
}

}  // namespace

absl::StatusOr<lora::AdapterVersionPtr> TeacherFinder::Find(
    const dispatch::StepTask& step) const {
  const auto& request = std::get<TrainRequest>(*step.request);
  const Teacher& teacher = request.loss.teacher;
  if (teacher.base_model) return nullptr;
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
  AdapterTable& adapters = context_.adapters;
  if (adapters.Find(*key) != nullptr) {
    const auto version = adapters.Version(*key, teacher.snapshot);
    if (!version.ok()) return OfTeacher(version.status());
    return version;
  }
  lora::AdapterImage image = adapters.Image(*key);
  if (!adapters.File(*key).name.empty()) {
    WEFT_RETURN_IF_ERROR(mover_.Read(*key, image));
  }
  absl::StatusOr<lora::AdapterVersionPtr> copy;
  WEFT_RETURN_IF_ERROR(context_.guard.Guarded("copying a teacher", [&] {
    copy = adapters.CopyVersion(*key, teacher.snapshot, image);
  }));
  if (!copy.ok()) return OfTeacher(copy.status());
  return copy;
}

}  // namespace weft::engine
