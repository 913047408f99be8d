// The version of this build, for --version, GetInfo and weft_build_info.
#ifndef WEFT_SERVER_VERSION_H_
#define WEFT_SERVER_VERSION_H_

#include <string>

namespace weft {

extern const char kVersion[];      // "0.1.0"
extern const char kGitRevision[];  // Short hash, or "unknown".

// Several lines: Weft's and its libraries' versions.
[[nodiscard]] std::string VersionText();

}  // namespace weft

#endif  // WEFT_SERVER_VERSION_H_
