// Parses the command line of one command: its flags and its words, which are
// the positional arguments.
#ifndef WEFT_CLIENT_WEFTCTL_ARGUMENTS_H_
#define WEFT_CLIENT_WEFTCTL_ARGUMENTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/channel.h"

namespace weft::client::weftctl {

struct FlagSpec {
  std::string name;   // Without dashes.
  std::string value;  // Placeholder in --help. Empty: the flag takes no value.
  std::string help;
  std::string default_value;
};

// Returns INVALID_ARGUMENT for a wrong command line. A payload distinguishes it
// from a server's error, and IsUsageError finds the payload.
absl::Status UsageError(absl::string_view message);
bool IsUsageError(const absl::Status& status);

// The flags and words of a command line. If a flag is not given, its getter
// returns the default. If the value or default does not parse, the getter
// returns a UsageError that names the flag.
class Arguments {
 public:
  // Accepts `--flag value`, `--flag=value` and `-o value` (--output) before,
  // between and after words. If a flag is given twice, the last value counts.
  // Errors: UsageError for an unknown flag, a missing value, or more or fewer
  // words than `words` names. If `last_optional`, the last word may be missing.
  static absl::StatusOr<Arguments> Parse(const std::vector<std::string>& given,
                                         const std::vector<FlagSpec>& flags,
                                         const std::vector<std::string>& words,
                                         bool last_optional);

  const std::string& word(size_t index) const;
  bool Has(const std::string& flag) const;
  std::string GetString(const std::string& flag) const;
  absl::StatusOr<int64_t> GetInt(const std::string& flag) const;
  absl::StatusOr<uint32_t> GetUint32(const std::string& flag) const;
  absl::StatusOr<double> GetDouble(const std::string& flag) const;
  absl::StatusOr<absl::Duration> GetDuration(const std::string& flag) const;
  // Parses a list such as "1,2,3".
  absl::StatusOr<std::vector<uint32_t>> GetTokens(
      const std::string& flag) const;

 private:
  std::map<std::string, std::string> defaults_;
  std::map<std::string, std::string> given_;
  std::vector<std::string> words_;
};

// weftctl's flags for TLS and for the token.
// Returns the flags. A flag that is not given takes its value from an
// environment variable. No flag holds the token itself, because everybody on
// the machine can see command lines.
std::vector<FlagSpec> SecurityFlags();

// Reads the files that the flags name, and WEFT_TOKEN. Errors: UsageError,
// which names the flag, if its file is empty or cannot be read.
absl::StatusOr<client::Security> ReadSecurity(const Arguments& arguments);

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_ARGUMENTS_H_
