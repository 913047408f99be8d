#include "client/weftctl/output.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "google/protobuf/util/json_util.h"

namespace weft::client::weftctl {
namespace {

// Returns the length of the character at the start of `text`, and sets `code`.
// Returns 0 if these bytes are not UTF-8.
size_t Decode(absl::string_view text, uint32_t* code) {
  const auto byte = [text](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned first = byte(0);
  if (first < 0x80) {
    *code = first;
    return 1;
  }
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (first < 0xc2 || first > 0xf4) return 0;
  *code = first & (0x7fU >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    *code = *code << 6 | (byte(i) & 0x3f);
  }
  const bool surrogate = *code >= 0xd800 && *code < 0xe000;
  return *code < kLeast[length] || *code > 0x10ffff || surrogate ? 0 : length;
}

bool ControlsTerminal(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c ||
         code == 0x200e || code == 0x200f ||
         (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t length = Decode(text, &code);
    if (length == 0) {
      absl::StrAppendFormat(&out, "\\x%02x",
                            static_cast<unsigned char>(text[0]));
    } else if (ControlsTerminal(code)) {
      absl::StrAppendFormat(&out, "\\u%04x", code);
    } else {
      out.append(text.data(), length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

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

void PrintTable(std::vector<Row> rows, std::ostream& out) {
  std::vector<size_t> widths;
  for (Row& row : rows) {
    for (std::string& cell : row) cell = Printable(cell);
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

std::string DescribeState(const v1::ServerInfo& info) {
  if (info.draining()) return "draining: takes no new work";
  if (info.model().architecture().empty()) return "starting";
  if (info.num_restoring() == 0) return "serving";
  return absl::StrCat(
      "restoring ", info.num_restoring(), " of ", info.num_adapters(),
      " adapters",
      info.restore_seconds() > 0
          ? absl::StrFormat(", about %.0f s left", info.restore_seconds())
          : "");
}

std::string DescribeState(const v1::Adapter& adapter) {
  return adapter.restoring() ? "restoring" : "ready";
}

}  // namespace weft::client::weftctl
