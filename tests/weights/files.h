// Makes files for the tests of weights: temporary folders, and safetensors from
// text.
#ifndef WEFT_TESTS_WEIGHTS_FILES_H_
#define WEFT_TESTS_WEIGHTS_FILES_H_

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace weft::weights {

// A separate folder, which is removed with its content.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "weft_weights_XXXXXX")
            .string();
    path_ = mkdtemp(pattern.data());
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() { std::filesystem::remove_all(path_); }

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string Write(std::string_view name,
                                  std::string_view contents) const {
    const std::string file = path_ + "/" + std::string(name);
    std::ofstream(file, std::ios::binary) << contents;
    return file;
  }

 private:
  std::string path_;
};

// Returns a safetensors file with exactly this header and `data_bytes` zeros.
inline std::string RawFile(std::string_view header, size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) {
    file.push_back(static_cast<char>(uint64_t{header.size()} >> (8 * i)));
  }
  file.append(header);
  file.append(data_bytes, '\0');
  return file;
}

}  // namespace weft::weights

#endif  // WEFT_TESTS_WEIGHTS_FILES_H_
