// The files of the model folder that turn text into tokens and back.
#ifndef WEFT_SERVER_CALL_TOKENIZER_FILES_H_
#define WEFT_SERVER_CALL_TOKENIZER_FILES_H_

#include <string>
#include <vector>

#include "src/base/files/file_source.h"

namespace weft::server {

// What GetTokenizer sends. Without a tokenizer.json there are no files, and the
// fingerprint is empty.
struct TokenizerFiles {
  std::vector<FileSource> files;  // In the order of their names.
  std::string fingerprint;        // ModelInfo.tokenizer_fingerprint.

  // Reads the files into memory, so that they stay as they were at the start.
  // Logs a warning if there is a file that cannot be read, and then returns no
  // files.
  static TokenizerFiles Load(const std::string& model_dir);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_TOKENIZER_FILES_H_
