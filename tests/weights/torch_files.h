// Makes valid and invalid pickles, zip archives and .bin files for tests.
#ifndef WEFT_TESTS_WEIGHTS_TORCH_FILES_H_
#define WEFT_TESTS_WEIGHTS_TORCH_FILES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/weights/zip_directory.h"

namespace weft::weights {

// Returns `value` as `num_bytes` bytes, lowest first.
inline std::string Le(uint64_t value, int num_bytes) {
  std::string bytes;
  for (int i = 0; i < num_bytes; ++i) {
    // Shifts by 8 each time, because a shift by 64 or more is undefined.
    bytes.push_back(static_cast<char>(value));
    value >>= 8;
  }
  return bytes;
}

// The functions below make parts of a pickle of protocol 2. None of them uses
// the memo.
inline std::string Pickle(const std::string& program) {
  return "\x80\x02" + program + ".";
}
inline std::string Str(std::string_view text) {
  return "X" + Le(text.size(), 4) + std::string(text);
}
inline std::string Int(int64_t value) {
  return "\x8a\x08" + Le(static_cast<uint64_t>(value), 8);
}
inline std::string Ints(const std::vector<int64_t>& values) {
  std::string tuple = "(";
  for (const int64_t value : values) tuple += Int(value);
  return tuple + "t";
}
inline constexpr char kNoHooks[] = "ccollections\nOrderedDict\n)R";

struct TestTensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::string storage = "0";
  int64_t storage_elements = 0;
  int64_t offset = 0;
  std::string type = "FloatStorage";
};

inline std::string StorageId(const TestTensor& t) {
  return "(" + Str("storage") + "ctorch\n" + t.type + "\n" + Str(t.storage) +
         Str("cpu") + Int(t.storage_elements) + "tQ";
}
inline std::string Tensor(const TestTensor& t) {
  return "ctorch._utils\n_rebuild_tensor_v2\n(" + StorageId(t) + Int(t.offset) +
         Ints(t.shape) + Ints(t.strides) + "\x89" + kNoHooks + "tR";
}
inline std::string Parameter(const TestTensor& t) {
  return "ctorch._utils\n_rebuild_parameter\n" + Tensor(t) + "\x88" + kNoHooks +
         "\x87R";
}
inline std::string DictOf(
    const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string dict = "}(";
  for (const auto& [name, value] : entries) dict += Str(name) + value;
  return dict + "u";
}

using ZipItems = std::vector<std::pair<std::string, std::string>>;

// Returns an archive as torch writes it: stored entries, sizes only in the
// directory, and a zip64 end record unless `zip64` is false.
inline std::string Zip(const ZipItems& items, bool zip64 = true) {
  std::string file;
  std::string directory;
  for (const auto& [name, data] : items) {
    const std::string offset = Le(file.size(), 4);
    const std::string crc = Le(Crc32(data), 4);
    const std::string size = Le(data.size(), 4);
    const std::string what = Le(0x0808, 2) + Le(0, 2) + Le(0, 4);
    file += "PK\x03\x04" + Le(0, 2) + what + Le(0, 12) + Le(name.size(), 2) +
            Le(0, 2) + name + data + "PK\x07\x08" + crc + size + size;
    directory += "PK\x01\x02" + Le(0, 4) + what + crc + size + size +
                 Le(name.size(), 2) + Le(0, 6) + Le(0, 6) + offset + name;
  }
  const uint64_t start = file.size();
  const uint64_t end = start + directory.size();
  const uint64_t n = items.size();
  file += directory;
  if (zip64) {
    file += "PK\x06\x06" + Le(44, 8) + Le(0, 4) + Le(0, 8) + Le(n, 8) +
            Le(n, 8) + Le(directory.size(), 8) + Le(start, 8);
    file += "PK\x06\x07" + Le(0, 4) + Le(end, 8) + Le(1, 4);
  }
  return file + "PK\x05\x06" + Le(0, 4) + Le(n, 2) + Le(n, 2) +
         Le(directory.size(), 4) + Le(start, 4) + Le(0, 2);
}

// Returns a .bin file. `storages` are keyed by name.
inline std::string TorchFile(const std::string& pickle,
                             const ZipItems& storages) {
  ZipItems items = {{"m/data.pkl", pickle}, {"m/byteorder", "little"}};
  for (const auto& [key, data] : storages) {
    items.emplace_back("m/data/" + key, data);
  }
  return Zip(items);
}

// Returns the file with `value` at `offset` in record n, counted from 0 among
// the records with this signature (such as "PK\1\2").
inline std::string Patch(std::string file, std::string_view signature, int n,
                         size_t offset, std::string_view value) {
  size_t at = file.find(signature);
  for (; n > 0; --n) at = file.find(signature, at + 1);
  return file.replace(at + offset, value.size(), value);
}

}  // namespace weft::weights

#endif  // WEFT_TESTS_WEIGHTS_TORCH_FILES_H_
