#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "nlohmann/json.hpp"
#include "src/base/files/operator_file.h"
#include "src/base/files/token_file.h"
#include "src/base/name.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
namespace {

using nlohmann::json;
using Records = std::vector<TokenEntry>;

absl::StatusOr<std::string> FilePath(const Session& session) {
  std::string path = session.arguments.GetString("file");
  if (path.empty()) {
    return UsageError("--file is required: weftd's --auth-tokens-file");
  }
  return path;
}

// Reads the token file. If `may_lack`, a missing file counts as empty, so that
// `create` can make the first token. A file that exists but cannot be opened is
// an error, because `create` would replace it and lose its tokens.
absl::StatusOr<Records> ReadRecords(const std::string& path, bool may_lack) {
  const absl::StatusOr<std::string> text = ReadOperatorFile(path);
  if (may_lack && absl::IsNotFound(text.status())) return Records();
  if (!text.ok()) {
    return absl::Status(
        text.status().code(),
        absl::StrCat("cannot read ", path, ": ", text.status().message()));
  }
  return ParseTokens(*text);
}

std::string Expiry(const TokenEntry& record) {
  if (record.expires == absl::InfiniteFuture()) return "never";
  const std::string time = absl::FormatTime(
      "%Y-%m-%d %H:%M UTC", record.expires, absl::UTCTimeZone());
  return record.expires <= absl::Now() ? absl::StrCat(time, " (expired)")
                                       : time;
}

std::string ScopeList(const TokenEntry& record) {
  return absl::StrJoin(record.scopes, ",", [](std::string* out, Scope scope) {
    out->append(ScopeName(scope));
  });
}

absl::StatusOr<TokenEntry> NewRecord(const Session& session) {
  const Arguments& arguments = session.arguments;
  TokenEntry record{.id = arguments.word(0),
                    .tenant = arguments.GetString("tenant")};
  if (!IsName(record.id)) {
    return UsageError(absl::StrCat("'", record.id, "' is not a name"));
  }
  if (!IsName(record.tenant) || record.tenant.size() > kMaxTenantLength) {
    return UsageError("--tenant: a name of at most 64 characters is required");
  }
  for (const absl::string_view name :
       absl::StrSplit(arguments.GetString("scopes"), ',')) {
    const absl::StatusOr<Scope> scope = ParseScope(name);
    if (!scope.ok()) {
      return UsageError(absl::StrCat("--scopes: ", scope.status().message()));
    }
    record.scopes.insert(*scope);
  }
  if (arguments.Has("valid-for")) {
    WEFT_ASSIGN_OR_RETURN(const auto valid_for,
                          arguments.GetDuration("valid-for"));
    record.expires = absl::Now() + valid_for;
  }
  return record;
}

absl::Status CreateToken(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const std::string path, FilePath(session));
  WEFT_ASSIGN_OR_RETURN(TokenEntry record, NewRecord(session));
  WEFT_ASSIGN_OR_RETURN(Records records, ReadRecords(path, /*may_lack=*/true));
  for (const TokenEntry& other : records) {
    if (other.id == record.id) {
      return absl::AlreadyExistsError(
          absl::StrCat("there is a token '", record.id, "'; revoke it first"));
    }
  }
  const std::string token = NewToken();
  record.sha256 = HashToken(token);
  const std::string id = record.id;
  records.push_back(std::move(record));
  WEFT_RETURN_IF_ERROR(WriteTokenFile(path, records));
  if (session.json) {
    session.out << json{{"id", id}, {"token", token}}.dump() << "\n";
  } else {
    session.out << token << "\n";
    session.err << "This is the only time that the token is shown.\n";
  }
  return absl::OkStatus();
}

absl::Status ListTokens(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const std::string path, FilePath(session));
  WEFT_ASSIGN_OR_RETURN(const Records records,
                        ReadRecords(path, /*may_lack=*/false));
  std::vector<Row> rows = {{"ID", "TENANT", "SCOPES", "EXPIRES"}};
  json list = json::array();
  for (const TokenEntry& record : records) {
    rows.push_back(
        {record.id, record.tenant, ScopeList(record), Expiry(record)});
    list.push_back({{"id", record.id},
                    {"tenant", record.tenant},
                    {"scopes", ScopeList(record)},
                    {"expires", Expiry(record)}});
  }
  if (session.json) {
    session.out << list.dump() << "\n";
  } else {
    PrintTable(rows, session.out);
  }
  return absl::OkStatus();
}

absl::Status RevokeToken(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const std::string path, FilePath(session));
  WEFT_ASSIGN_OR_RETURN(Records records, ReadRecords(path, /*may_lack=*/false));
  const std::string& id = session.arguments.word(0);
  const size_t removed = std::erase_if(
      records, [&id](const TokenEntry& record) { return record.id == id; });
  if (removed == 0) {
    return absl::NotFoundError(absl::StrCat("there is no token '", id, "'"));
  }
  return WriteTokenFile(path, records);
}

FlagSpec FileFlag() {
  const char* const file = std::getenv("WEFT_AUTH_TOKENS_FILE");
  return {"file", "FILE", "weftd's tokens, or WEFT_AUTH_TOKENS_FILE",
          file == nullptr ? "" : file};
}

}  // namespace

std::vector<Command> TokenCommands() {
  std::vector<Command> commands = {
      {"token create",
       "Add a token to weftd's file and print it, this once.",
       CreateToken,
       {"ID"},
       {FileFlag(),
        {"tenant", "NAME", "whose adapters it may use", ""},
        {"scopes", "LIST", "of read, sample, train, admin", "train,sample"},
        {"valid-for", "DURATION", "such as 720h; without: until revoked", ""}}},
      {"token list",
       "The tokens of weftd's file.",
       ListTokens,
       {},
       {FileFlag()}},
      {"token revoke",
       "Remove a token; weftd refuses it within a second.",
       RevokeToken,
       {"ID"},
       {FileFlag()}}};
  for (Command& command : commands) command.offline = true;
  return commands;
}

}  // namespace weft::client::weftctl
