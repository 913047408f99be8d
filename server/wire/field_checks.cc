#include "server/wire/field_checks.h"

#include <algorithm>
#include <bit>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/name.h"
#include "src/base/tokens.h"

namespace weft::server {
namespace {

constexpr size_t kMaxQuotedBytes = 48;

}  // namespace

std::string Interval::ToString() const {
  return absl::StrCat(low_open ? "(" : "[", low, ", ", high,
                      high_open ? ")" : "]");
}

std::string Quoted(absl::string_view text) {
  const bool is_long = text.size() > kMaxQuotedBytes;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kMaxQuotedBytes)),
                      is_long ? "..." : "", "\"");
}

absl::Status BadField(absl::string_view field, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(field, " ", problem));
}

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (IsName(name)) return absl::OkStatus();
  if (name.empty()) return BadField(field, "is required");
  return BadField(field, "is ", Quoted(name),
                  ", must match [A-Za-z0-9][A-Za-z0-9._-]{0,127} and "
                  "not end in a dot");
}

absl::Status CheckAdapterId(absl::string_view field, absl::string_view id,
                            bool engine_names) {
  const size_t separator = id.find(kTenantSeparator);
  const bool qualified = engine_names && separator != absl::string_view::npos &&
                         separator <= kMaxTenantLength &&
                         IsName(id.substr(0, separator)) &&
                         IsName(id.substr(separator + 1));
  return qualified ? absl::OkStatus() : CheckName(field, id);
}

absl::Status CheckReal(absl::string_view field, double value,
                       const Interval& interval) {
  if (interval.Contains(value)) return absl::OkStatus();
  return BadField(field, "is ", value, ", must be in ", interval.ToString());
}

absl::Status CheckCount(absl::string_view field, uint64_t value, uint64_t low,
                        uint64_t high, absl::string_view flag) {
  if (value >= low && value <= high) return absl::OkStatus();
  return BadField(field, "is ", value, ", must be in [", low, ", ", high, "]",
                  flag.empty() ? "" : " (the server's ", flag,
                  flag.empty() ? "" : ")");
}

int64_t FindBadId(absl::Span<const int32_t> ids, int vocab_size) {
  uint32_t largest = 0;
  for (const int32_t id : ids) {
    largest = std::max(largest, static_cast<uint32_t>(id));
  }
  const auto limit = static_cast<uint32_t>(vocab_size);
  if (largest < limit) return -1;
  const auto bad = std::find_if(ids.begin(), ids.end(), [limit](int32_t id) {
    return static_cast<uint32_t>(id) >= limit;
  });
  return bad == ids.end() ? -1 : bad - ids.begin();
}

int64_t FindNonFinite(absl::Span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  const auto is_bad = [](float value) {
    return (std::bit_cast<uint32_t>(value) & kExponent) == kExponent;
  };
  // The loop has no early exit, so that the compiler vectorizes it. An early
  // exit would save little, because nearly all requests are valid.
  bool any = false;
  for (const float value : values) any |= is_bad(value);
  if (!any) return -1;
  return std::find_if(values.begin(), values.end(), is_bad) - values.begin();
}

int64_t FindPositive(absl::Span<const float> values) {
  const auto bad = std::find_if(values.begin(), values.end(),
                                [](float value) { return value > 0; });
  return bad == values.end() ? -1 : bad - values.begin();
}

absl::Status CheckIds(absl::string_view field, absl::Span<const int32_t> ids,
                      int vocab_size) {
  const int64_t bad = FindBadId(ids, vocab_size);
  if (bad < 0) return absl::OkStatus();
  return BadField(absl::StrCat(field, "[", bad, "]"), "is ",
                  static_cast<uint32_t>(ids[static_cast<size_t>(bad)]),
                  ", must be in [0, ", vocab_size, ")");
}

}  // namespace weft::server
