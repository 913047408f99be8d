#include "src/base/reason.h"

#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace weft {
namespace {

constexpr char kPayload[] = "weft/reason";

}  // namespace

absl::Status WithReason(absl::Status status, const Reason& reason) {
  std::string text = reason.name;
  for (const auto& [key, value] : reason.values) {
    absl::StrAppend(&text, "\n", key, "=", value);
  }
  status.SetPayload(kPayload, absl::Cord(text));
  return status;
}

std::optional<Reason> FindReason(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  if (!payload) return std::nullopt;
  const std::string text(*payload);
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  Reason reason{.name = lines.front(), .values = {}};
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::pair<std::string, std::string> entry =
        absl::StrSplit(lines[i], absl::MaxSplits('=', 1));
    reason.values.insert(entry);
  }
  return reason;
}

absl::Status MovedTo(const std::string& owner, const std::string& adapter) {
  if (owner.empty()) {
    return WithReason(
        absl::UnavailableError("no server is known to have what the call is "
                               "for, until one takes it over: try again"),
        {.name = "STANDBY", .values = {}});
  }
  if (!adapter.empty()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "the server at ", owner, " has adapter '", adapter, "'")),
        {.name = "MOVED",
         .values = {{"address", owner}, {"adapter", adapter}}});
  }
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "the server at ", owner, " has what the call is for: call it there")),
      {.name = "MOVED", .values = {{"address", owner}}});
}

}  // namespace weft
