// Reads fields of a JSON object, and checks their types. A field that is null
// counts as absent, as in the SDK. Refuses fields that ask for what the Tinker
// API has and Weft does not offer: they must not be ignored, because a caller
// relies on them.
// Errors: INVALID_ARGUMENT with a message that names the field.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_WIRE_FIELDS_H_
#define WEFT_SERVER_TINKER_WIRE_FIELDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::server::tinker {

using Json = nlohmann::json;

// Returns the field, or nullptr if it is absent.
const Json* Find(const Json& object, const char* name);

// Return the field. If it is absent, return `otherwise`, or an error without
// `otherwise`.
absl::StatusOr<std::string> Text(
    const Json& object, const char* name,
    const std::optional<std::string>& otherwise = std::nullopt);
absl::StatusOr<int64_t> Int(
    const Json& object, const char* name,
    const std::optional<int64_t>& otherwise = std::nullopt);
absl::StatusOr<bool> Bool(const Json& object, const char* name, bool otherwise);

// Returns the field. An absent field is an error.
absl::StatusOr<const Json*> Object(const Json& object, const char* name);

// Returns the field, a list. The error calls it `shown`.
absl::StatusOr<const Json*> List(const Json& object, const char* name,
                                 absl::string_view shown);

// Returns a whole number in [low, 1e9], or `otherwise` if the field is absent.
// The validation of the request knows the limit of the server.
absl::StatusOr<uint32_t> Count(const Json& object, const char* name,
                               int64_t otherwise, double low = 1);

// Returns the field, or nullopt if it is absent.
absl::StatusOr<std::optional<double>> Number(const Json& object,
                                             const char* name);

// The longest text that ShownField accepts.
inline constexpr size_t kMaxShownBytes = 4096;
// Returns the field as JSON text, in which form the front keeps what it will
// show to clients: parsed JSON takes many times the memory. Empty if the field
// is absent. Errors: INVALID_ARGUMENT above kMaxShownBytes.
absl::StatusOr<std::string> ShownField(const Json& object, const char* name);
// Converts the result of ShownField back. Null if it is empty.
Json Shown(const std::string& text);
// Sets the field `user_metadata` to the result of ShownField if it is an
// object, which the SDK expects.
void ShowMetadata(const std::string& text, Json* object);

// Reads a list of whole numbers in the range of int32. Error messages contain
// `name`.
absl::StatusOr<std::vector<int32_t>> Int32List(const Json& value,
                                               const char* name);

// Returns the tokens of the field `name` of `object`, a prompt or a training
// sequence in the form {"chunks": [{"type": "encoded_text", "tokens": [...]}]}.
// Errors: also UNIMPLEMENTED for a chunk that is not text.
absl::StatusOr<std::vector<int32_t>> ReadModelInput(const Json& object,
                                                    const char* name);

// The loss with Weft's own formula. The field asks for a record of the samples
// (SampleRequest.record).
inline constexpr char kStableReinforce[] = "stable_reinforce";
inline constexpr char kStabilityInfo[] = "record_stability_info";

// Returns UNIMPLEMENTED, because there are no projects, with the name of the
// field that names some.
absl::Status NoProjects(const char* field);

// Returns whether the body has this field with a value other than null, false,
// zero or empty.
bool AsksFor(const Json& body, const char* field);

// Returns UNIMPLEMENTED if the body asks for what Weft does not offer. The
// message says what the caller can do instead.
absl::Status RefuseFields(const Json& body);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_WIRE_FIELDS_H_
