#include "src/startup/model_fingerprint.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/request/digest.h"

namespace weft::engine {
namespace {

namespace fs = std::filesystem;

// The most bytes read at each of three places of a file: from its beginning,
// from its middle, and before its end.
constexpr uint64_t kSampleBytes = 256 << 10;

std::string Samples(const fs::path& path) {
  std::error_code error;
  const uint64_t size = fs::file_size(path, error);
  if (error) return "";
  std::ifstream file(path, std::ios::binary);
  std::string bytes = absl::StrCat(size, ":");
  std::string buffer(kSampleBytes, 0);
  for (const uint64_t begin :
       {uint64_t{0}, size / 2, size - std::min(size, kSampleBytes)}) {
    file.clear();
    file.seekg(static_cast<std::streamoff>(begin));
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    bytes.append(buffer, 0, static_cast<size_t>(file.gcount()));
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::string> ModelFingerprint(const EngineOptions& options) {
  const fs::path folder(options.model_dir);
  std::ifstream config(folder / "config.json");
  if (!config) {
    return absl::NotFoundError(
        absl::StrCat("--model=", options.model_dir, " has no config.json"));
  }
  std::stringstream text;
  text << config.rdbuf();
  std::string digests = Sha256(text.str());
  std::vector<fs::path> files;
  std::error_code error;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(folder, error)) {
    const fs::path extension = entry.path().extension();
    if (extension == ".safetensors" || extension == ".bin") {
      files.push_back(entry.path());
    }
  }
  std::ranges::sort(files);
  for (const fs::path& file : files) digests += Sha256(Samples(file));
  return absl::BytesToHexString(Sha256(digests));
}

}  // namespace weft::engine
