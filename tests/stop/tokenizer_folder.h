// A folder with a tokenizer.json, removed with the object.
#ifndef WEFT_TESTS_STOP_TOKENIZER_FOLDER_H_
#define WEFT_TESTS_STOP_TOKENIZER_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace weft::sampling {

class TokenizerFolder {
 public:
  TokenizerFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "weft_stop_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  // Writes a byte-level BPE with this vocabulary and these added tokens.
  explicit TokenizerFolder(const std::string& vocab,
                           const std::string& added_tokens = "[]")
      : TokenizerFolder() {
    Write(R"({"added_tokens":)" + added_tokens +
          R"(,"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":)" +
          vocab + R"(,"merges":["a b",["a","b"]]}})");
  }
  TokenizerFolder(const TokenizerFolder&) = delete;
  TokenizerFolder& operator=(const TokenizerFolder&) = delete;
  ~TokenizerFolder() { std::filesystem::remove_all(path_); }

  void Write(const std::string& contents) const {
    std::ofstream(path_ + "/tokenizer.json", std::ios::binary) << contents;
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace weft::sampling

#endif  // WEFT_TESTS_STOP_TOKENIZER_FOLDER_H_
