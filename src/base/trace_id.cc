#include "src/base/trace_id.h"

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weft {
namespace {

constexpr size_t kMaxJoined = 16;

thread_local TraceId current;

bool IsLowerHex(std::string_view text) {
  return std::ranges::all_of(text, [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c)) ||
           (c >= 'a' && c <= 'f');
  });
}

bool IsZero(std::string_view text) {
  return text.find_first_not_of('0') == std::string_view::npos;
}

// Returns the trace id in a header of the form version-traceid-parentid-flags;
// empty if the header is not valid. A version above 00 may have more fields.
std::string_view TraceOf(std::string_view header) {
  constexpr size_t kSize = 55;
  if (header.size() < kSize || header[2] != '-' || header[35] != '-' ||
      header[52] != '-') {
    return {};
  }
  const std::string_view version = header.substr(0, 2);
  const std::string_view trace = header.substr(3, 32);
  const std::string_view parent = header.substr(36, 16);
  const bool sized =
      header.size() == kSize || (version != "00" && header[kSize] == '-');
  if (!sized || version == "ff" || !IsLowerHex(version) || !IsLowerHex(trace) ||
      IsZero(trace) || !IsLowerHex(parent) || IsZero(parent) ||
      !IsLowerHex(header.substr(53, 2))) {
    return {};
  }
  return trace;
}

bool IsRequestId(std::string_view text) {
  return !text.empty() && text.size() <= kMaxTraceIdBytes &&
         std::ranges::all_of(text, [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  c == '-' || c == '_' || c == '.';
         });
}

std::string RandomId() {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  return absl::StrFormat("%016x%016x", random(), random());
}

}  // namespace

TraceId MakeTraceId(std::string_view traceparent, std::string_view request_id) {
  if (const std::string_view trace = TraceOf(traceparent); !trace.empty()) {
    return std::make_shared<const std::string>(trace);
  }
  if (IsRequestId(request_id)) {
    return std::make_shared<const std::string>(request_id);
  }
  return std::make_shared<const std::string>(RandomId());
}

TraceId CurrentTrace() { return current; }

TraceId JoinTraces(const std::vector<TraceId>& ids) {
  std::vector<TraceId> named;
  size_t others = 0;
  for (const TraceId& id : ids) {
    if (id == nullptr) continue;
    if (named.size() == kMaxJoined) {
      ++others;
    } else if (std::ranges::none_of(
                   named, [&](const TraceId& o) { return *o == *id; })) {
      named.push_back(id);
    }
  }
  if (named.size() <= 1) return named.empty() ? nullptr : named.front();
  std::string joined = *named.front();
  for (size_t i = 1; i < named.size(); ++i) {
    absl::StrAppend(&joined, ",", *named[i]);
  }
  if (others > 0) absl::StrAppend(&joined, ",+", others);
  return std::make_shared<const std::string>(std::move(joined));
}

TraceScope::TraceScope(TraceId id)
    : outer_(std::exchange(current, std::move(id))) {}

TraceScope::~TraceScope() { current = std::move(outer_); }

}  // namespace weft
