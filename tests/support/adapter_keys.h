// Maps the names of adapters in a test to keys, and back.
#ifndef WEFT_TESTS_SUPPORT_ADAPTER_KEYS_H_
#define WEFT_TESTS_SUPPORT_ADAPTER_KEYS_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "src/request/adapter_key.h"

namespace weft {

// Names, indexed by key. The base model's name is empty.
inline std::vector<std::string>& AdapterNames() {
  static std::vector<std::string> names = {""};
  return names;
}

// Returns the same key for the same name. Threads: not thread-safe.
inline AdapterKey Key(std::string_view name) {
  std::vector<std::string>& names = AdapterNames();
  const auto it = std::ranges::find(names, name);
  if (it == names.end()) {
    names.emplace_back(name);
    return static_cast<AdapterKey>(names.size() - 1);
  }
  return static_cast<AdapterKey>(it - names.begin());
}

inline const std::string& NameOf(AdapterKey key) {
  return AdapterNames().at(static_cast<size_t>(key));
}

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_ADAPTER_KEYS_H_
