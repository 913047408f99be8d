// The version of this build, for --version, GetInfo and weft_build_info.
#ifndef WEFT_SERVER_FLAGS_VERSION_H_
#define WEFT_SERVER_FLAGS_VERSION_H_

#include <string>

namespace weft::server {

extern const char kVersion[];      // For example "0.1.0".
extern const char kGitRevision[];  // Short hash of the commit, or "unknown".

// Returns several lines: the versions of Weft and its libraries.
std::string VersionText();

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_VERSION_H_
