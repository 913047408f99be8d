#include "src/base/log.h"

#include <unistd.h>

#include <atomic>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/trace_id.h"

namespace weft {
namespace {

std::atomic<LogLevel> g_minimum{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

constexpr std::string_view kLevelNames[] = {"debug", "info", "warning",
                                            "error"};

std::string Escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04x", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string Quote(std::string_view text) {
  return absl::StrCat("\"", Escape(text), "\"");
}

bool NeedsQuotes(std::string_view text) {
  return text.empty() ||
         text.find_first_of(" \"\\=\n\r\t") != std::string_view::npos;
}

}  // namespace

void SetLogLevel(LogLevel minimum) { g_minimum.store(minimum); }
void SetLogFormat(LogFormat format) { g_format.store(format); }

std::string FormatLogLine(LogFormat format, LogLevel level,
                          std::string_view rfc3339_time,
                          std::string_view message,
                          std::initializer_list<LogField> fields) {
  const std::string_view name = kLevelNames[static_cast<int>(level)];
  const TraceId trace = CurrentTrace();
  std::string line;
  if (format == LogFormat::kJson) {
    line =
        absl::StrCat("{\"ts\":", Quote(rfc3339_time),
                     ",\"level\":", Quote(name), ",\"msg\":", Quote(message));
    for (const LogField& field : fields) {
      absl::StrAppend(&line, ",", Quote(field.key), ":",
                      field.is_string ? Quote(field.value) : field.value);
    }
    if (trace != nullptr) {
      absl::StrAppend(&line, ",\"trace_id\":", Quote(*trace));
    }
    return line + "}";
  }
  line = absl::StrCat(std::string(rfc3339_time), " ", std::string(name), " ",
                      Escape(message));
  for (const LogField& field : fields) {
    const bool quote = field.is_string && NeedsQuotes(field.value);
    absl::StrAppend(&line, " ", field.key, "=",
                    quote ? Quote(field.value) : Escape(field.value));
  }
  if (trace != nullptr) absl::StrAppend(&line, " trace_id=", *trace);
  return line;
}

void Log(LogLevel level, std::string_view message,
         std::initializer_list<LogField> fields) {
  if (level < g_minimum.load()) return;
  const std::string time = absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(),
                                            absl::UTCTimeZone());
  std::string line =
      FormatLogLine(g_format.load(), level, time, message, fields);
  line += '\n';
  // The service continues even if its log cannot be written.
  [[maybe_unused]] const ssize_t written =
      ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace weft
