// Fuzzes the index of a sharded checkpoint. No input may crash, and no accepted
// file name leads out of the checkpoint's folder.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/string_view.h"
#include "src/weights/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto index = weft::weights::ParseShardIndex(
      absl::string_view(reinterpret_cast<const char*>(data), size));
  if (!index.ok()) return 0;
  for (const auto& [tensor, file] : *index) {
    const std::filesystem::path path(file);
    if (path.filename() != path || file == "." || file == "..") std::abort();
  }
  return 0;
}
