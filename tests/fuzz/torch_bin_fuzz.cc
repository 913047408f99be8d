// Fuzzes .bin files. No input may crash, and every tensor that is found is
// inside the file. An input that starts like a pickle is parsed as a pickle
// without its archive. Inside an archive, the checksums would keep a fuzzer
// from most of the pickle machine.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "src/weights/regular_file.h"
#include "src/weights/torch_bin.h"
#include "tests/support/memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr char kPickleStart = '\x80';
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  if (!input.empty() && input[0] == kPickleStart) {
    (void)weft::weights::ParseTorchPickle(input);
    return 0;
  }
  const weft::MemoryFile memory({input.data(), input.size()});
  const auto file = weft::weights::RegularFile::Open(memory.path());
  if (!file.ok()) std::abort();
  const auto tensors = weft::weights::ReadTorchDirectory(*file);
  if (!tensors.ok()) return 0;
  for (const auto& [name, tensor] : *tensors) {
    if (tensor.row_major &&
        (tensor.offset > size || tensor.size_bytes > size - tensor.offset)) {
      std::abort();
    }
  }
  return 0;
}
