#include "client/weftctl/arguments.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/base/files/operator_file.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
namespace {

constexpr char kUsagePayload[] = "weftctl/usage";

absl::Status BadValue(const std::string& flag, const std::string& value,
                      const char* wanted) {
  return UsageError(
      absl::StrCat("--", flag, ": '", value, "' is not ", wanted));
}

std::string FromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Returns the content of the file that the flag or its default names; "" if
// neither names a file.
absl::StatusOr<std::string> ReadFile(const Arguments& arguments,
                                     const std::string& flag) {
  const std::string path = arguments.GetString(flag);
  if (path.empty()) return std::string();
  absl::StatusOr<std::string> contents = ReadOperatorFile(path);
  if (!contents.ok()) {
    return UsageError(absl::StrCat("--", flag, ": cannot read ", path, ": ",
                                   contents.status().message()));
  }
  if (contents->empty()) {
    return UsageError(absl::StrCat("--", flag, ": ", path, " is empty"));
  }
  return contents;
}

}  // namespace

absl::Status UsageError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsagePayload, absl::Cord());
  return status;
}

bool IsUsageError(const absl::Status& status) {
  return status.GetPayload(kUsagePayload).has_value();
}

absl::StatusOr<Arguments> Arguments::Parse(
    const std::vector<std::string>& given, const std::vector<FlagSpec>& flags,
    const std::vector<std::string>& words, bool last_optional) {
  Arguments result;
  for (const FlagSpec& flag : flags) {
    result.defaults_.emplace(flag.name, flag.default_value);
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].size() < 2 || given[i][0] != '-') {
      result.words_.push_back(given[i]);
      continue;
    }
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(given[i], absl::MaxSplits('=', 1));
    const std::string name =
        parts.first == "-o" ? "output" : parts.first.substr(2);
    const auto spec = std::ranges::find(flags, name, &FlagSpec::name);
    if (spec == flags.end() ||
        (parts.first != "-o" && !absl::StartsWith(given[i], "--"))) {
      return UsageError(absl::StrCat("unknown flag ", parts.first));
    }
    if (spec->value.empty()) {
      result.given_[name] = "true";
    } else if (absl::StrContains(given[i], '=')) {
      result.given_[name] = parts.second;
    } else if (i + 1 < given.size()) {
      result.given_[name] = given[++i];
    } else {
      return UsageError(
          absl::StrCat("--", name, " needs a value: ", spec->value));
    }
  }
  const size_t least = words.size() - (last_optional ? 1 : 0);
  if (result.words_.size() < least || result.words_.size() > words.size()) {
    return UsageError(absl::StrCat("expected ", words.empty() ? "no words" : "",
                                   absl::StrJoin(words, " "), ", got ",
                                   result.words_.empty() ? "nothing" : "",
                                   absl::StrJoin(result.words_, " ")));
  }
  result.words_.resize(words.size());
  return result;
}

const std::string& Arguments::word(size_t index) const { return words_[index]; }

bool Arguments::Has(const std::string& flag) const {
  return given_.count(flag) > 0;
}

std::string Arguments::GetString(const std::string& flag) const {
  const auto found = given_.find(flag);
  return found != given_.end() ? found->second : defaults_.at(flag);
}

absl::StatusOr<int64_t> Arguments::GetInt(const std::string& flag) const {
  int64_t value = 0;
  const std::string text = GetString(flag);
  if (!absl::SimpleAtoi(text, &value) || value < 0) {
    return BadValue(flag, text, "a whole number >= 0");
  }
  return value;
}

absl::StatusOr<uint32_t> Arguments::GetUint32(const std::string& flag) const {
  uint32_t value = 0;
  const std::string text = GetString(flag);
  if (!absl::SimpleAtoi(text, &value)) {
    return BadValue(flag, text, "a whole number in [0, 2^32)");
  }
  return value;
}

absl::StatusOr<double> Arguments::GetDouble(const std::string& flag) const {
  double value = 0;
  const std::string text = GetString(flag);
  if (!absl::SimpleAtod(text, &value)) return BadValue(flag, text, "a number");
  return value;
}

absl::StatusOr<absl::Duration> Arguments::GetDuration(
    const std::string& flag) const {
  absl::Duration value;
  const std::string text = GetString(flag);
  if (!absl::ParseDuration(text, &value) || value <= absl::ZeroDuration()) {
    return BadValue(flag, text, "a duration such as 500ms, 2s or 10m");
  }
  return value;
}

absl::StatusOr<std::vector<uint32_t>> Arguments::GetTokens(
    const std::string& flag) const {
  std::vector<uint32_t> tokens;
  const std::string text = GetString(flag);
  for (const auto part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    uint32_t token = 0;
    if (!absl::SimpleAtoi(part, &token)) {
      return BadValue(flag, text, "a list of token ids such as 1,2,3");
    }
    tokens.push_back(token);
  }
  return tokens;
}

std::vector<FlagSpec> SecurityFlags() {
  return {
      {"token-file", "FILE",
       "the token to send, or WEFT_TOKEN_FILE; WEFT_TOKEN is a token itself",
       FromEnvironment("WEFT_TOKEN_FILE")},
      {"tls", "", "TLS with the authorities of the system, or WEFT_TLS=1", ""},
      {"ca", "FILE", "TLS with these authorities (PEM), or WEFT_CA",
       FromEnvironment("WEFT_CA")},
      {"client-cert", "FILE", "for mutual TLS (PEM), or WEFT_CLIENT_CERT",
       FromEnvironment("WEFT_CLIENT_CERT")},
      {"client-key", "FILE", "its private key (PEM), or WEFT_CLIENT_KEY",
       FromEnvironment("WEFT_CLIENT_KEY")},
      {"server-name", "NAME",
       "the name in the server's certificate, or WEFT_SERVER_NAME",
       FromEnvironment("WEFT_SERVER_NAME")}};
}

absl::StatusOr<client::Security> ReadSecurity(const Arguments& arguments) {
  client::Security security;
  const struct {
    const char* flag;
    std::string* contents;
  } files[] = {{"token-file", &security.token},
               {"ca", &security.root_certificates},
               {"client-cert", &security.certificate},
               {"client-key", &security.private_key}};
  for (const auto& file : files) {
    WEFT_ASSIGN_OR_RETURN(std::string contents, ReadFile(arguments, file.flag));
    *file.contents = std::move(contents);
  }
  // --token-file takes precedence over WEFT_TOKEN, which takes precedence over
  // WEFT_TOKEN_FILE.
  const std::string token = FromEnvironment("WEFT_TOKEN");
  if (!token.empty() && !arguments.Has("token-file")) security.token = token;
  absl::StripAsciiWhitespace(&security.token);
  security.tls = arguments.Has("tls") || FromEnvironment("WEFT_TLS") == "1";
  security.server_name = arguments.GetString("server-name");
  return security;
}

}  // namespace weft::client::weftctl
