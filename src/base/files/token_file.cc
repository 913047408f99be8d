#include "src/base/files/token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "src/base/files/file_io.h"
#include "src/base/name.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

using nlohmann::json;

constexpr size_t kHashDigits = 64;

absl::Status BadField(const char* field, const char* wanted) {
  return absl::InvalidArgumentError(absl::StrCat(field, " ", wanted));
}

// Returns the string in the field; empty if the field is absent or not a
// string.
std::string Text(const json& object, const char* field) {
  const auto found = object.find(field);
  if (found == object.end() || !found->is_string()) return "";
  return found->get<std::string>();
}

bool IsHash(absl::string_view text) {
  return text.size() == kHashDigits && std::ranges::all_of(text, [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) ||
                  (c >= 'a' && c <= 'f');
         });
}

absl::Status ReadScopes(const json& object, std::set<Scope>* out) {
  const auto scopes = object.find("scopes");
  if (scopes == object.end() || !scopes->is_array() || scopes->empty()) {
    return BadField("scopes", "must be a list that names at least one");
  }
  for (const json& name : *scopes) {
    const auto scope =
        ParseScope(name.is_string() ? name.get<std::string>() : "");
    if (!scope.ok()) {
      return BadField("scopes", "must be of read, sample, train, admin");
    }
    out->insert(*scope);
  }
  return absl::OkStatus();
}

absl::Status ReadExpiry(const json& object, absl::Time* out) {
  if (!object.contains("expires")) return absl::OkStatus();
  std::string ignored;
  if (!absl::ParseTime(absl::RFC3339_full, Text(object, "expires"), out,
                       &ignored)) {
    return BadField("expires", "must be a time such as 2027-01-31T00:00:00Z");
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenEntry> ParseLine(absl::string_view line) {
  const json object = json::parse(line.begin(), line.end(), nullptr,
                                  /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return absl::InvalidArgumentError("is not a JSON object");
  }
  // An unknown field may be a limit of a later version. The token is refused,
  // because otherwise it could do more than its file says.
  for (const auto& [field, value] : object.items()) {
    if (field != "id" && field != "sha256" && field != "tenant" &&
        field != "scopes" && field != "expires") {
      return absl::InvalidArgumentError(
          "has a field other than id, sha256, tenant, scopes, expires");
    }
  }
  TokenEntry record{.id = Text(object, "id"),
                    .sha256 = Text(object, "sha256"),
                    .tenant = Text(object, "tenant")};
  if (!IsName(record.id)) return BadField("id", "must be a name");
  if (!IsName(record.tenant) || record.tenant.size() > kMaxTenantLength) {
    return BadField("tenant", "must be a name of at most 64 characters");
  }
  if (!IsHash(record.sha256)) {
    return BadField("sha256", "must be 64 digits of 0-9a-f");
  }
  WEFT_RETURN_IF_ERROR(ReadScopes(object, &record.scopes));
  WEFT_RETURN_IF_ERROR(ReadExpiry(object, &record.expires));
  return record;
}

}  // namespace

absl::StatusOr<std::vector<TokenEntry>> ParseTokens(absl::string_view text) {
  std::vector<TokenEntry> records;
  std::set<std::string> ids;
  int number = 0;
  for (const absl::string_view raw : absl::StrSplit(text, '\n')) {
    ++number;
    const absl::string_view line = absl::StripAsciiWhitespace(raw);
    if (line.empty()) continue;
    absl::StatusOr<TokenEntry> record = ParseLine(line);
    if (!record.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": ", record.status().message()));
    }
    if (!ids.insert(record->id).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": id is that of an earlier line"));
    }
    records.push_back(*std::move(record));
  }
  return records;
}

std::string FormatTokens(const std::vector<TokenEntry>& records) {
  std::string text;
  for (const TokenEntry& record : records) {
    nlohmann::ordered_json scopes = nlohmann::ordered_json::array();
    for (const Scope scope : record.scopes) scopes.push_back(ScopeName(scope));
    nlohmann::ordered_json object = {{"id", record.id},
                                     {"sha256", record.sha256},
                                     {"tenant", record.tenant},
                                     {"scopes", std::move(scopes)}};
    if (record.expires != absl::InfiniteFuture()) {
      object["expires"] = absl::FormatTime(absl::RFC3339_sec, record.expires,
                                           absl::UTCTimeZone());
    }
    absl::StrAppend(&text, object.dump(), "\n");
  }
  return text;
}

absl::Status WriteTokenFile(const std::string& path,
                            const std::vector<TokenEntry>& records) {
  // If the path is a symbolic link, its target is replaced, because other
  // programs may read the target directly.
  std::error_code ignored;
  std::filesystem::path target = std::filesystem::canonical(path, ignored);
  if (ignored) target = path;
  const std::string folder =
      target.has_parent_path() ? target.parent_path().string() : ".";
  WEFT_ASSIGN_OR_RETURN(const UniqueFd dir,
                        OpenDirectory(folder, "the folder of the token file"));
  const std::string name = target.filename().string();
  const std::string draft = absl::StrCat(".", name, ".new-", getpid());
  struct stat old = {};
  const bool exists = fstatat(dir.get(), name.c_str(), &old, 0) == 0;
  absl::Status status = WriteFileAt(dir.get(), draft, FormatTokens(records));
  if (status.ok() &&
      (fchmodat(dir.get(), draft.c_str(), exists ? old.st_mode & 07777 : 0600,
                0) != 0 ||
       // If root replaces the file, the new file gets the old owner, so that
       // the daemon's user can still read it.
       (exists && geteuid() == 0 &&
        fchownat(dir.get(), draft.c_str(), old.st_uid, old.st_gid, 0) != 0) ||
       renameat(dir.get(), draft.c_str(), dir.get(), name.c_str()) != 0)) {
    status = ErrnoStatus(errno, "replacing the token file");
  }
  if (!status.ok()) {
    unlinkat(dir.get(), draft.c_str(), 0);
    return status;
  }
  return SyncDirectory(dir.get(), "the folder of the token file");
}

}  // namespace weft
