// Fuzzes whole safetensors files. No input may crash, and every tensor that is
// found is inside the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "src/weights/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto tensors = weft::weights::ParseSafetensors(file);
  if (!tensors.ok()) return 0;
  for (const auto& [name, view] : *tensors) {
    const auto* begin = reinterpret_cast<const char*>(view.bytes.data());
    if (begin < file.data() ||
        begin + view.bytes.size() > file.data() + file.size()) {
      std::abort();
    }
  }
  return 0;
}
