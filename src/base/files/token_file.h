// The file of --auth-tokens-file: one line of JSON for each token.
//
//   {"id": "ci", "sha256": "9f86...", "tenant": "acme",
//    "scopes": ["train", "sample"], "expires": "2027-01-31T00:00:00Z"}
//
// "expires" may be absent. Empty lines are skipped.
// Threads: any.
#ifndef WEFT_SRC_BASE_FILES_TOKEN_FILE_H_
#define WEFT_SRC_BASE_FILES_TOKEN_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/base/tokens.h"

namespace weft {

// Reads the text of the file. Errors: INVALID_ARGUMENT, which names the line
// and the problem. The message never quotes the line, because the line may hold
// a token by mistake.
absl::StatusOr<std::vector<TokenEntry>> ParseTokens(absl::string_view text);

std::string FormatTokens(const std::vector<TokenEntry>& records);

// Replaces the file atomically, so that a reader sees either the old or the new
// content. A new file gets mode 0600. A replaced file keeps its mode. If two
// processes write at once, the later write wins. Errors: those of ErrnoStatus,
// such as NOT_FOUND if the folder is missing.
absl::Status WriteTokenFile(const std::string& path,
                            const std::vector<TokenEntry>& records);

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_TOKEN_FILE_H_
