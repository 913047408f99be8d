#include "src/engine/train/teacher_finder.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/adapters/state_image.h"

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
  if (!adapters.File(key).name.empty() &&
      adapters.Borrowed(key, teacher.snapshot) == nullptr) {
    const auto size =
        static_cast<int64_t>(adapters.Facts(key).info.num_parameters);
    WEFT_RETURN_IF_ERROR(mover_.Read(adapters.File(key), size, image));
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

std::optional<TeacherFinder::Source> TeacherFinder::InStore(
    const StepTask& step) const {
  const auto& loss = std::get<TrainRequest>(*step.request).loss;
  if (context_.options.state.empty() || !HasTeacher(loss.function) ||
      loss.teacher.base_model) {
    return std::nullopt;
  }
  const std::optional<AdapterKey> key =
      context_.dispatcher.adapters().KeyOf(loss.teacher.adapter_id);
  AdapterTable& adapters = context_.adapters;
  // A step of the teacher itself finds it on the device.
  if (!key || *key == step.adapter || adapters.Find(*key) != nullptr ||
      !adapters.CopyBytes(*key, loss.teacher.snapshot).ok()) {
    return std::nullopt;
  }
  Source source{.key = *key,
                .snapshot = loss.teacher.snapshot,
                .file = adapters.File(*key)};
  const bool reads = source.file.durable &&
                     adapters.Borrowed(source.key, source.snapshot) == nullptr;
  return reads ? std::make_optional(std::move(source)) : std::nullopt;
}

bool TeacherFinder::NeedsFetch(const StepTask& step) const {
  return InStore(step).has_value();
}

void TeacherFinder::Fetch(const StepTask& step, const Fetched& done) const {
  Read(*InStore(step), done);
}

void TeacherFinder::Read(const Source& source, const Fetched& done) const {
  AdapterTable& adapters = context_.adapters;
  const auto is_there = [this, source] {
    return !context_.dispatcher.adapters().NameOf(source.key).empty() &&
           context_.adapters.Find(source.key) == nullptr &&
           context_.adapters.File(source.key).name == source.file.name;
  };
  // Find says what is wrong, or finds the teacher where it is now.
  if (!is_there()) return done(nullptr);
  const auto size =
      static_cast<int64_t>(adapters.Facts(source.key).info.num_parameters);
  context_.PostIo("", [this, source, done, size, is_there,
                       image = adapters.Image(source.key)]() mutable {
    absl::Status status = mover_.Read(source.file, size, image);
    context_.dispatcher.Post(
        [=, this, image = std::move(image)](const absl::Status& open) {
          if (!open.ok()) return;
          if (IsStoreAway(context_, status)) {
            return context_.when_store_answers(
                [this, source, done](const absl::Status& still_open) {
                  if (still_open.ok()) Read(source, done);
                });
          }
          if (!status.ok()) return done(status);
          if (!is_there()) return done(nullptr);
          absl::StatusOr<lora::AdapterVersionPtr> version;
          const absl::Status made =
              context_.guard.Guarded("reading a teacher", [&] {
                version = context_.adapters.Borrow(source.key, source.snapshot,
                                                   image);
              });
          done(made.ok() ? std::move(version) : made);
        });
  });
}

}  // namespace weft::engine
