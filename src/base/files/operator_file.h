// Reads the files that an operator or a user names, such as certificates,
// tokens and settings.
#ifndef WEFT_SRC_BASE_FILES_OPERATOR_FILE_H_
#define WEFT_SRC_BASE_FILES_OPERATOR_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace weft {

// Reads the whole file and follows links. A pipe is read to its end.
// Errors:  those of ErrnoStatus, such as NOT_FOUND, or INTERNAL for a folder;
//          RESOURCE_EXHAUSTED if the file is larger than 16 MiB. The message
//          does not name the path.
// Threads: any. Blocks on the disk.
absl::StatusOr<std::string> ReadOperatorFile(const std::string& path);

// Warns if other users may write `path`, a file or a folder, or if it belongs
// to a user who is neither this process' nor root. Its group may write it.
void WarnIfOthersMayWrite(const std::string& path);

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_OPERATOR_FILE_H_
