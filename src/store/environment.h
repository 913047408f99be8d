#ifndef WEFT_SRC_STORE_ENVIRONMENT_H_
#define WEFT_SRC_STORE_ENVIRONMENT_H_

#include <cstdlib>
#include <initializer_list>
#include <string>

namespace weft::store {

// Returns the first of these environment variables that is not empty, or "".
inline std::string Environment(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && value[0] != '\0') return value;
  }
  return "";
}

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_ENVIRONMENT_H_
