// Checks of single request fields. Each failure is INVALID_ARGUMENT, unless a
// comment says otherwise, with a message of the form
//   <field path> is <value>, must be <limit>
// Paths are built only on failure, so that a valid request of a million tokens
// does not pay for them.
#ifndef WEFT_SERVER_FIELD_CHECKS_H_
#define WEFT_SERVER_FIELD_CHECKS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft {

// Later code computes in f32. Values within this bound stay finite there.
inline constexpr double kLargestReal = 1e30;

// An interval of reals. No interval contains NaN.
struct Interval {
  double low = 0;
  double high = kLargestReal;
  bool low_open = false;
  bool high_open = false;

  [[nodiscard]] bool Contains(double value) const {
    return (low_open ? value > low : value >= low) &&
           (high_open ? value < high : value <= high);
  }
  [[nodiscard]] std::string ToString() const;
};

// Returns a client's string for a message: escaped, and at most 48 bytes of it.
[[nodiscard]] std::string Quoted(absl::string_view text);

// Returns INVALID_ARGUMENT with the message "<field> <problem>".
[[nodiscard]] absl::Status BadField(absl::string_view field,
                                    absl::string_view problem);

// Checks the name by IsName of src/base/name.h.
[[nodiscard]] absl::Status CheckName(absl::string_view field,
                                     absl::string_view name);

// The same for an adapter's id. With `engine_names` it may also be TENANT~ID.
[[nodiscard]] absl::Status CheckAdapterId(absl::string_view field,
                                          absl::string_view id,
                                          bool engine_names);

[[nodiscard]] absl::Status CheckReal(absl::string_view field, double value,
                                     const Interval& interval);
[[nodiscard]] absl::Status CheckCount(absl::string_view field, uint64_t value,
                                      uint64_t low, uint64_t high);

// Returns the index of the first id outside [0, vocab_size), or -1. The ids of
// messages are unsigned and stored as int32, so a negative id means 2^31 or
// more.
[[nodiscard]] int64_t FindBadId(absl::Span<const int32_t> ids, int vocab_size);

// Returns the index of the first value that is NaN or infinite, or -1.
[[nodiscard]] int64_t FindNonFinite(absl::Span<const float> values);

// Returns the index of the first value above zero, or -1.
[[nodiscard]] int64_t FindPositive(absl::Span<const float> values);

// Returns the error "<field>[<index>] is <id>, must be in [0, <vocab_size>)"
// for ids[index].
[[nodiscard]] absl::Status BadId(absl::string_view field, int64_t index,
                                 int32_t id, int vocab_size);

}  // namespace weft

#endif  // WEFT_SERVER_FIELD_CHECKS_H_
