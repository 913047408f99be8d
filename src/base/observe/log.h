// Structured log lines on stderr: one event with a few typed fields.
//
//   Log(LogLevel::kInfo, "adapter created", {{"adapter", id}, {"rank", 16}});
//
// A line is text, or JSON after SetLogFormat(LogFormat::kJson). Control
// characters are escaped, so that a client's string cannot forge a line. Never
// log prompts, samples, bearer tokens or the contents of files. Threads: any.
// Each line is one write(2) by the caller, or by the log's thread after
// StartLogThread.
#ifndef WEFT_SRC_BASE_OBSERVE_LOG_H_
#define WEFT_SRC_BASE_OBSERVE_LOG_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace weft {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat { kText, kJson };

// A key and a value that prints as a JSON number, boolean or string.
struct LogField {
  template <typename T>
  requires std::is_arithmetic_v<T> LogField(std::string_view field_key,
                                            T number)
      : key(field_key), is_string(false) {
    if constexpr (std::is_same_v<T, bool>) {
      value = number ? "true" : "false";
    } else {
      value = absl::StrCat(number);
    }
  }
  LogField(std::string_view field_key, std::string_view text)
      : key(field_key), value(text), is_string(true) {}
  LogField(std::string_view field_key, const char* text)
      : LogField(field_key, std::string_view(text)) {}
  LogField(std::string_view field_key, const std::string& text)
      : LogField(field_key, std::string_view(text)) {}
  // Needed where Abseil was built as C++14: its string_view is then a different
  // type from std::string_view.
  template <typename T>
  requires(std::is_same_v<T, absl::string_view> &&
           !std::is_same_v<T, std::string_view>)
      LogField(std::string_view field_key, T text)
      : LogField(field_key, std::string_view(text.data(), text.size())) {}

  std::string key;
  std::string value;
  bool is_string;
};

void SetLogLevel(LogLevel minimum);
void SetLogFormat(LogFormat format);

void Log(LogLevel level, std::string_view message,
         std::initializer_list<LogField> fields = {});

// From now on a thread writes the lines, so that a reader of stderr that stops
// reading blocks nobody. If more than a mebibyte of lines waits, further lines
// are dropped, and a line says how many when the reader goes on. So are lines
// that cannot be written, for example to a full disk. Call it once,
// after the process has set its signal mask.
void StartLogThread();
// Waits until the lines so far are written, or `limit` has passed. Call it
// before the process ends.
void FlushLog(absl::Duration limit);
// Returns how many lines were dropped since the start.
uint64_t NumDroppedLogLines();

// Returns the line that Log writes, without its newline.
std::string FormatLogLine(LogFormat format, LogLevel level,
                          std::string_view rfc3339_time,
                          std::string_view message,
                          std::initializer_list<LogField> fields);

}  // namespace weft

#endif  // WEFT_SRC_BASE_OBSERVE_LOG_H_
