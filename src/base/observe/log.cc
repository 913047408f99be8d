#include "src/base/observe/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/base/trace_id.h"

namespace weft {
namespace {

std::atomic<LogLevel> g_minimum{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

constexpr std::string_view kLevelNames[] = {"debug", "info", "warning",
                                            "error"};

struct Character {
  size_t size = 0;  // In bytes; 0 if the text does not begin with UTF-8.
  uint32_t code = 0;
};

// Returns the first character of a text that is not empty.
Character FirstCharacter(std::string_view text) {
  const auto byte = [text](size_t i) {
    return static_cast<unsigned char>(text[i]);
  };
  if (byte(0) < 0x80) return {.size = 1, .code = byte(0)};
  size_t size = 0;  // From the first byte, whose other bits begin the code.
  if ((byte(0) & 0xe0) == 0xc0) size = 2;
  if ((byte(0) & 0xf0) == 0xe0) size = 3;
  if ((byte(0) & 0xf8) == 0xf0) size = 4;
  if (size == 0 || text.size() < size) return {};
  uint32_t code = byte(0) & (0x7fU >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  // The least code of each size, and the codes that UTF-8 must not have.
  constexpr uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[size - 2] || code > 0x10ffff || surrogate) return {};
  return {.size = size, .code = code};
}

// Returns whether a terminal or an editor may obey the character instead of
// showing it: controls, line and paragraph separators, and marks that turn the
// direction of the text.
bool IsControl(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code <= 0x9f) || code == 0x061c ||
         code == 0x200e || code == 0x200f ||
         (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}

// Writes controls as \uXXXX, and a byte that is not UTF-8 as \\xXX. So a
// client's text cannot forge a line, and every line is JSON that parsers take.
std::string Escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const char c = text[0];
    const Character first = FirstCharacter(text);
    const size_t size = std::max<size_t>(first.size, 1);
    if (first.size == 0) {
      absl::StrAppendFormat(&out, "\\\\x%02x", static_cast<unsigned char>(c));
    } else if (IsControl(first.code)) {
      absl::StrAppendFormat(&out, "\\u%04x", first.code);
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += text.substr(0, size);
    }
    text.remove_prefix(size);
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

// Returns how many lines could not be written. The service continues without
// them.
uint64_t WriteToStderr(std::string_view lines) {
  while (!lines.empty()) {
    const ssize_t count = ::write(STDERR_FILENO, lines.data(), lines.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
      pollfd room = {STDERR_FILENO, POLLOUT, 0};
      ::poll(&room, 1, /*timeout=*/1000);
      continue;
    }
    if (count <= 0) {
      return static_cast<uint64_t>(std::ranges::count(lines, '\n'));
    }
    lines.remove_prefix(static_cast<size_t>(count));
  }
  return 0;
}

std::string MakeLine(LogLevel level, std::string_view message,
                     std::initializer_list<LogField> fields) {
  const std::string time = absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(),
                                            absl::UTCTimeZone());
  return FormatLogLine(g_format.load(), level, time, message, fields) + "\n";
}

// Lines that wait for the log's thread.
class LogQueue {
 public:
  void Start() {
    MutexLock lock(&mu_);
    runs_ = true;
    std::thread([this] { Loop(); }).detach();
  }

  // Returns false if there is no thread.
  bool Add(std::string_view line) {
    MutexLock lock(&mu_);
    if (!runs_) return false;
    if (waiting_.size() + line.size() > kMaxWaitingBytes) {
      ++num_dropped_;
      return true;
    }
    waiting_ += line;
    changed_.NotifyAll();
    return true;
  }

  void Flush(absl::Duration limit) {
    const auto end =
        std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(limit);
    MutexLock lock(&mu_);
    while (runs_ && (writes_ || !waiting_.empty())) {
      const auto left = end - std::chrono::steady_clock::now();
      if (left.count() <= 0) return;
      changed_.WaitFor(&mu_, left);
    }
  }

  void AddDropped(uint64_t lines) {
    MutexLock lock(&mu_);
    num_dropped_ += lines;
  }

  uint64_t num_dropped() {
    MutexLock lock(&mu_);
    return num_dropped_;
  }

 private:
  static constexpr size_t kMaxWaitingBytes = 1 << 20;

  void Loop() {
    uint64_t reported = 0;
    for (;;) {
      std::string lines;
      {
        MutexLock lock(&mu_);
        writes_ = false;
        changed_.NotifyAll();
        while (waiting_.empty()) changed_.Wait(&mu_);
        writes_ = true;
        lines.swap(waiting_);
      }
      AddDropped(WriteToStderr(lines));
      const uint64_t dropped = num_dropped();
      if (dropped == reported) continue;
      const std::string report =
          MakeLine(LogLevel::kWarning, "log lines were dropped",
                   {{"lines", dropped - reported}});
      if (WriteToStderr(report) == 0) reported = dropped;
    }
  }

  Mutex mu_;
  CondVar changed_;
  bool runs_ ABSL_GUARDED_BY(mu_) = false;
  bool writes_ ABSL_GUARDED_BY(mu_) = false;
  std::string waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t num_dropped_ ABSL_GUARDED_BY(mu_) = 0;
};

// Is never destroyed, because its thread never ends.
LogQueue& Queue() {
  static LogQueue& queue = *new LogQueue;
  return queue;
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
  const std::string line = MakeLine(level, message, fields);
  if (!Queue().Add(line)) Queue().AddDropped(WriteToStderr(line));
}

void StartLogThread() { Queue().Start(); }
void FlushLog(absl::Duration limit) { Queue().Flush(limit); }
uint64_t NumDroppedLogLines() { return Queue().num_dropped(); }

}  // namespace weft
