#include "client/weftctl/output.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "google/protobuf/util/json_util.h"

namespace weft::weftctl {

void PrintJson(const google::protobuf::Message& message, std::ostream& out) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  // The conversion fails only for malformed Any messages, which the API does
  // not have.
  if (google::protobuf::util::MessageToJsonString(message, &json, options)
          .ok()) {
    out << json << "\n";
  }
}

void PrintTable(const std::vector<Row>& rows, std::ostream& out) {
  std::vector<size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const bool last = i + 1 == row.size();
      out << row[i];
      if (!last) out << std::string(widths[i] - row[i].size() + 2, ' ');
    }
    out << "\n";
  }
}

std::string FormatBytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

std::string FormatTime(double unix_seconds) {
  if (unix_seconds == 0) return "-";
  const absl::Time time = absl::UnixEpoch() + absl::Seconds(unix_seconds);
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", time, absl::LocalTimeZone());
}

}  // namespace weft::weftctl
