#include "src/base/observe/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"

namespace weft {
namespace {

constexpr int kBarWidth = 30;
constexpr absl::Duration kTerminalInterval = absl::Milliseconds(100);
constexpr absl::Duration kLineInterval = absl::Seconds(5);

std::string Amount(double value, std::string_view unit) {
  if (unit != "B") return absl::StrFormat("%.0f %s", value, unit);
  constexpr const char* kPrefixes[] = {"B", "kB", "MB", "GB", "TB"};
  size_t prefix = 0;
  while (value >= 1000 && prefix + 1 < std::size(kPrefixes)) {
    value /= 1000;
    ++prefix;
  }
  return absl::StrFormat("%.*f %s", prefix == 0 ? 0 : 2, value,
                         kPrefixes[prefix]);
}

}  // namespace

Progress::Progress(std::string_view label, int64_t total, std::string_view unit)
    : label_(label),
      total_(total),
      unit_(unit),
      is_terminal_(isatty(STDERR_FILENO) != 0),
      start_(SteadyNow()),
      last_print_(start_) {}

Progress::~Progress() {
  MutexLock lock(&mu_);
  Print(/*last=*/true);
}

void Progress::Add(int64_t amount) {
  MutexLock lock(&mu_);
  done_ += amount;
  const absl::Time now = SteadyNow();
  if (now - last_print_ < (is_terminal_ ? kTerminalInterval : kLineInterval)) {
    return;
  }
  last_print_ = now;
  Print(/*last=*/false);
}

absl::Duration Progress::TimeLeft() const {
  MutexLock lock(&mu_);
  if (done_ <= 0 || done_ >= total_) return absl::ZeroDuration();
  return (SteadyNow() - start_) * static_cast<double>(total_ - done_) /
         static_cast<double>(done_);
}

std::string Progress::Format(std::string_view label, int64_t done,
                             int64_t total, std::string_view unit,
                             absl::Duration elapsed, int bar_width) {
  const double seconds = std::max(absl::ToDoubleSeconds(elapsed), 1e-9);
  const double rate = static_cast<double>(done) / seconds;
  std::string line(label);
  if (total > 0) {
    const double fraction = std::clamp(
        static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
    if (bar_width > 0) {
      const int filled = static_cast<int>(fraction * bar_width);
      absl::StrAppend(&line, " [", std::string(filled, '#'),
                      std::string(bar_width - filled, '.'), "]");
    }
    absl::StrAppendFormat(&line, " %3.0f%%", fraction * 100);
  }
  absl::StrAppend(&line, " ", Amount(static_cast<double>(done), unit), " ",
                  Amount(rate, unit), "/s");
  if (total > done && done > 0) {
    absl::StrAppendFormat(&line, " eta %.0fs",
                          static_cast<double>(total - done) / rate);
  } else {
    absl::StrAppendFormat(&line, " in %.1fs", seconds);
  }
  return line;
}

void Progress::Print(bool last) {
  const std::string line =
      Format(label_, done_, total_, unit_, SteadyNow() - start_,
             is_terminal_ ? kBarWidth : 0);
  if (is_terminal_) {
    std::fprintf(stderr, "\r\033[K%s%s", line.c_str(), last ? "\n" : "");
  } else {
    Log(LogLevel::kInfo, line);
  }
}

}  // namespace weft
