// Checks of single request fields. A failure is INVALID_ARGUMENT, mostly with a
// message of the form
//   <field path> is <value>, must be <limit>
// Functions that check many values return an index, so that the caller builds
// the path of a value only after a failure.
#ifndef WEFT_SERVER_WIRE_FIELD_CHECKS_H_
#define WEFT_SERVER_WIRE_FIELD_CHECKS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::server {

// The largest real that an Interval permits by default. It is finite in f32.
inline constexpr double kLargestReal = 1e30;

// An interval of reals. No interval contains NaN.
struct Interval {
  double low = 0;
  double high = kLargestReal;
  bool low_open = false;
  bool high_open = false;

  bool Contains(double value) const {
    return (low_open ? value > low : value >= low) &&
           (high_open ? value < high : value <= high);
  }
  std::string ToString() const;
};

// Returns the first 48 bytes of a client's string, escaped and in quotes.
std::string Quoted(absl::string_view text);

// Returns INVALID_ARGUMENT with the message "<field> <problem>", where the
// field has the client's name for it (NameOfField). The parts of the problem
// are those of absl::StrCat.
absl::Status BadField(absl::string_view field, absl::string_view problem);
template <typename... Parts>
requires(sizeof...(Parts) > 1) absl::Status
    BadField(absl::string_view field, const Parts&... problem) {
  return BadField(field, absl::string_view(absl::StrCat(problem...)));
}

// Checks that `name` matches [A-Za-z0-9][A-Za-z0-9._-]{0,127} and does not end
// in a dot.
absl::Status CheckName(absl::string_view field, absl::string_view name);

// Like CheckName, for an adapter's id. With `engine_names`, also permits
// TENANT~ID.
absl::Status CheckAdapterId(absl::string_view field, absl::string_view id,
                            bool engine_names);

absl::Status CheckReal(absl::string_view field, double value,
                       const Interval& interval);
// The message also names `flag`, the server's flag that sets `high`, if any.
absl::Status CheckCount(absl::string_view field, uint64_t value, uint64_t low,
                        uint64_t high, absl::string_view flag = "");

// Returns the index of the first id outside [0, vocab_size), or -1. Requests
// have uint32 ids, which are stored as int32. So a request's id of 2^31 or more
// is a negative number here.
int64_t FindBadId(absl::Span<const int32_t> ids, int vocab_size);

// Returns the index of the first value that is NaN or infinite, or -1.
int64_t FindNonFinite(absl::Span<const float> values);

// Returns the index of the first value above zero, or -1.
int64_t FindPositive(absl::Span<const float> values);

// Checks that all ids are in [0, vocab_size). `field` is the list's.
absl::Status CheckIds(absl::string_view field, absl::Span<const int32_t> ids,
                      int vocab_size);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_FIELD_CHECKS_H_
