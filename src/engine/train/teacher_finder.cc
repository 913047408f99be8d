#include "src/engine/train/teacher_finder.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <string>

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

int64_t TeacherFinder::CopiedBytes() const {
  int64_t bytes = 0;
  if (context_.recorder.replaying()) return bytes;
  for (const auto& copy : copies_) {
    const lora::AdapterVersionPtr version = copy.lock();
    if (version == nullptr) continue;
    bytes += static_cast<int64_t>(version->weights_N.nbytes());
    if (version->compute_N.scalar_type() != at::kFloat) {
      bytes += static_cast<int64_t>(version->compute_N.nbytes());
    }
  }
  return bytes;
}

bool TeacherFinder::IsCopy(const lora::AdapterVersionPtr& version) const {
  return version != nullptr &&
         std::ranges::any_of(
             copies_, [&](const auto& copy) { return copy.lock() == version; });
}

absl::Status TeacherFinder::CheckRoom(AdapterKey key, const Teacher& teacher,
                                      bool shared_only) const {
  WEFT_ASSIGN_OR_RETURN(const int64_t bytes,
                        context_.adapters.CopyBytes(key, teacher.snapshot));
  const int64_t budget = context_.options.memory_budget_bytes;
  const int64_t held = CopiedBytes();
  const bool fits = held + bytes <= budget && (bytes == 0 || !shared_only);
  if (budget == 0 || fits || context_.recorder.replaying()) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "adapter_id: adapter '", teacher.adapter_id,
      "' is not on the device, and a copy of its weights takes ", bytes,
      " bytes. Copies for steps under way take ", held,
      " bytes already, and --memory-budget has ", budget,
      ": raise it or --max-resident-adapters, or use fewer teachers at a "
      "time"));
}

absl::StatusOr<lora::AdapterVersionPtr> TeacherFinder::Copy(
    AdapterKey key, const Teacher& teacher, bool shared_only) {
  const absl::Status room = CheckRoom(key, teacher, shared_only);
  if (!room.ok()) return OfTeacher(room);
  AdapterTable& adapters = context_.adapters;
  lora::AdapterImage image = adapters.Image(key);
  if (!adapters.File(key).name.empty()) {
    WEFT_RETURN_IF_ERROR(mover_.Read(key, image));
  }
  absl::StatusOr<lora::AdapterVersionPtr> copy;
  WEFT_RETURN_IF_ERROR(context_.guard.Guarded("copying a teacher", [&] {
    copy = adapters.CopyVersion(key, teacher.snapshot, image);
  }));
  if (!copy.ok()) return OfTeacher(copy.status());
  std::erase_if(copies_, [&](const auto& other) {
    return other.expired() || other.lock() == *copy;
  });
  copies_.push_back(*copy);
  return copy;
}

absl::StatusOr<lora::AdapterVersionPtr> TeacherFinder::Find(
    const dispatch::StepTask& step, bool shared_only) {
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
  if (context_.adapters.Find(*key) == nullptr) {
    return Copy(*key, teacher, shared_only);
  }
  const auto version = context_.adapters.Version(*key, teacher.snapshot);
  if (!version.ok()) return OfTeacher(version.status());
  return version;
}

}  // namespace weft::engine
