// A folder with a tokenizer.json, removed with the object.
#ifndef WEFT_TESTS_SAMPLING_TOKENIZER_FOLDER_H_
#define WEFT_TESTS_SAMPLING_TOKENIZER_FOLDER_H_

#include <string>

#include "tests/support/temp_folder.h"

namespace weft::sampling {

class TokenizerFolder {
 public:
  TokenizerFolder() = default;
  // Writes a byte-level BPE with this vocabulary and these added tokens.
  explicit TokenizerFolder(const std::string& vocab,
                           const std::string& added_tokens = "[]") {
    Write(R"({"added_tokens":)" + added_tokens +
          R"(,"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":)" +
          vocab + R"(,"merges":["a b",["a","b"]]}})");
  }

  void Write(const std::string& contents) const {
    folder_.Write("tokenizer.json", contents);
  }
  const std::string& path() const { return folder_.path(); }

 private:
  const TempFolder folder_;
};

}  // namespace weft::sampling

#endif  // WEFT_TESTS_SAMPLING_TOKENIZER_FOLDER_H_
