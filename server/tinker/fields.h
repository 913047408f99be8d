// Fields of a JSON object, each read with the type it must have. A field that
// is null counts as absent, which the SDK takes for the same.
// Errors: INVALID_ARGUMENT naming the field.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_FIELDS_H_
#define WEFT_SERVER_TINKER_FIELDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace weft::tinker {

using Json = nlohmann::json;

// The value, or null where the object has none.
[[nodiscard]] const Json* Find(const Json& object, const char* name);

// Required ones.
[[nodiscard]] absl::StatusOr<std::string> StringField(const Json& object,
                                                      const char* name);
[[nodiscard]] absl::StatusOr<int64_t> IntField(const Json& object,
                                               const char* name);
[[nodiscard]] absl::StatusOr<const Json*> ObjectField(const Json& object,
                                                      const char* name);

// Optional ones.
[[nodiscard]] absl::StatusOr<std::string> StringOr(const Json& object,
                                                   const char* name,
                                                   const char* otherwise);
[[nodiscard]] absl::StatusOr<int64_t> IntOr(const Json& object,
                                            const char* name,
                                            int64_t otherwise);
[[nodiscard]] absl::StatusOr<std::optional<double>> NumberIfAny(
    const Json& object, const char* name);
[[nodiscard]] absl::StatusOr<bool> BoolOr(const Json& object, const char* name,
                                          bool otherwise);

// A list of whole numbers that fit in 32 bits, read from `value`.
[[nodiscard]] absl::StatusOr<std::vector<int32_t>> Int32List(const Json& value,
                                                             const char* name);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FIELDS_H_
