#include "server/tinker/checkpoint_path.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

struct KindNames {
  CheckpointKind kind;
  absl::string_view segment;
  const char* type;
  const char* saved_by;
};
constexpr KindNames kKinds[] = {
    {CheckpointKind::kTraining, "weights", "training", "save_weights"},
    {CheckpointKind::kSampler, "sampler_weights", "sampler",
     "save_weights_for_sampler"},
    {CheckpointKind::kExternal, "external_weights", "external",
     "save_weights_external"}};

const KindNames& NamesOf(CheckpointKind kind) {
  return kKinds[static_cast<size_t>(kind)];
}

absl::Status BadPath(absl::string_view field, absl::string_view path) {
  return BadField(field, absl::StrCat("is ", Quoted(path),
                                      ", must be "
                                      "tinker://RUN/KIND/NAME, KIND being "
                                      "weights, sampler_weights or "
                                      "external_weights"));
}

}  // namespace

std::string CheckpointPath::Id() const {
  return absl::StrCat(NamesOf(kind).segment, "/", name);
}

std::string CheckpointPath::ToString() const {
  return absl::StrCat(kPathScheme, run, "/", Id());
}

std::string CheckpointPath::WeftName() const {
  if (kind == CheckpointKind::kTraining) return name;
  return absl::StrCat(NamesOf(kind).segment, ".", name);
}

const char* CheckpointPath::KindName() const { return NamesOf(kind).type; }

const char* CheckpointPath::SavedBy() const { return NamesOf(kind).saved_by; }

CheckpointPath PathOfWeft(absl::string_view run, absl::string_view weft_name) {
  CheckpointPath path{.run = std::string(run), .name = std::string(weft_name)};
  for (const KindNames& names : kKinds) {
    const std::string prefix = absl::StrCat(names.segment, ".");
    if (names.kind == CheckpointKind::kTraining ||
        !absl::StartsWith(weft_name, prefix)) {
      continue;
    }
    path.kind = names.kind;
    path.name = std::string(weft_name.substr(prefix.size()));
  }
  return path;
}

absl::StatusOr<CheckpointPath> NameCheckpoint(absl::string_view field,
                                              absl::string_view run,
                                              CheckpointKind kind,
                                              absl::string_view name) {
  WEFT_RETURN_IF_ERROR(CheckName(field, name));
  CheckpointPath path{
      .run = std::string(run), .kind = kind, .name = std::string(name)};
  WEFT_RETURN_IF_ERROR(CheckName(field, path.WeftName()));
  if (PathOfWeft(run, path.WeftName()).kind == kind) return path;
  return BadField(field, absl::StrCat("has the name ", Quoted(name),
                                      ", which begins as another kind's"));
}

absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    const absl::StatusOr<std::string>& path, absl::string_view field) {
  WEFT_RETURN_IF_ERROR(path.status());
  absl::string_view rest = *path;
  if (!absl::ConsumePrefix(&rest, kPathScheme)) return BadPath(field, *path);
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, '/');
  if (parts.size() != 3 || parts[0].empty()) return BadPath(field, *path);
  for (const KindNames& names : kKinds) {
    if (parts[1] != names.segment) continue;
    return NameCheckpoint(field, parts[0], names.kind, parts[2]);
  }
  return BadPath(field, *path);
}

}  // namespace weft::server::tinker
