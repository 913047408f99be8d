// Encodes plain values as bytes. This is not a file format: the writer and the
// reader must come from the same build and run on the same kind of machine.
#ifndef WEFT_SRC_EXECUTOR_WIRE_H_
#define WEFT_SRC_EXECUTOR_WIRE_H_

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/string_view.h"

namespace weft::executor {

class Writer {
 public:
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Put(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Put(const std::vector<T>& values) {
    Put(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()),
                  values.size() * sizeof(T));
  }
  // `tensor` is on the host or undefined.
  void Put(const at::Tensor& tensor);

  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads what a Writer wrote, in the same order. Throws c10::Error when it reads
// past the end.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Get(T& value) {
    std::memcpy(&value, Take(sizeof(value)), sizeof(value));
  }
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Get(std::vector<T>& values) {
    size_t size = 0;
    Get(size);
    TORCH_CHECK(size <= bytes_.size() / sizeof(T), "a message is cut short");
    values.resize(size);
    if (size > 0)
      std::memcpy(values.data(), Take(size * sizeof(T)), size * sizeof(T));
  }
  void Get(at::Tensor& tensor);

 private:
  const char* Take(size_t size) {
    TORCH_CHECK(size <= bytes_.size(), "a message is cut short");
    const char* data = bytes_.data();
    bytes_.remove_prefix(size);
    return data;
  }

  absl::string_view bytes_;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_WIRE_H_
