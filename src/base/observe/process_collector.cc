#include "src/base/observe/process_collector.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "src/base/observe/log.h"

namespace weft {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

// Positions of fields in /proc/self/stat, counted after the process name
// because the name may contain spaces. See proc(5).
constexpr size_t kUserTicks = 11;
constexpr size_t kSystemTicks = 12;
constexpr size_t kNumThreads = 17;
constexpr size_t kStartTicks = 19;
constexpr size_t kVirtualBytes = 20;
constexpr size_t kResidentPages = 21;

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

std::optional<double> BootTime() {
  const std::string text = ReadFile("/proc/stat");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double seconds = 0;
    if (absl::StartsWith(line, "btime ") &&
        absl::SimpleAtod(line.substr(6), &seconds)) {
      return seconds;
    }
  }
  return std::nullopt;
}

std::optional<double> CountOpenFiles() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return std::nullopt;
  double count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count - 3;  // Subtracts ".", ".." and the descriptor of this folder
                     // itself.
}

void Append(std::vector<MetricFamily>* families, const char* name,
            const char* help, MetricType type, double value) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  family.metric.emplace_back();
  family.metric[0].counter.value = value;
  family.metric[0].gauge.value = value;
  families->push_back(std::move(family));
}

void AppendStat(std::vector<MetricFamily>* families) {
  const std::string text = ReadFile("/proc/self/stat");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return;
  const std::vector<std::string> fields =
      absl::StrSplit(text.substr(name_end + 2), ' ');
  std::vector<double> values(kResidentPages + 1, 0);
  if (fields.size() < values.size()) return;
  for (size_t i = kUserTicks; i < values.size(); ++i) {
    if (!absl::SimpleAtod(fields[i], &values[i])) return;
  }
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
  Append(families, "process_cpu_seconds_total",
         "User and system CPU time spent in seconds.", MetricType::Counter,
         (values[kUserTicks] + values[kSystemTicks]) / ticks);
  Append(families, "process_threads", "Threads of the process.",
         MetricType::Gauge, values[kNumThreads]);
  Append(families, "process_virtual_memory_bytes",
         "Virtual memory size in bytes.", MetricType::Gauge,
         values[kVirtualBytes]);
  Append(families, "process_resident_memory_bytes",
         "Resident memory size in bytes.", MetricType::Gauge,
         values[kResidentPages] * page);
  if (const auto boot = BootTime()) {
    Append(families, "process_start_time_seconds",
           "Unix time at which the process started, in seconds.",
           MetricType::Gauge, *boot + values[kStartTicks] / ticks);
  }
}

}  // namespace

std::vector<MetricFamily> ProcessCollector::Collect() const {
  std::vector<MetricFamily> families;
  AppendStat(&families);
  if (const auto open = CountOpenFiles()) {
    Append(&families, "process_open_fds", "Open file descriptors.",
           MetricType::Gauge, *open);
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    Append(&families, "process_max_fds",
           "Most file descriptors the process may open.", MetricType::Gauge,
           static_cast<double>(limit.rlim_cur));
  }
  Append(&families, "weft_log_lines_dropped_total",
         "Log lines dropped because nobody reads stderr and a mebibyte of "
         "lines waits, or because stderr cannot be written.",
         MetricType::Counter, static_cast<double>(NumDroppedLogLines()));
  return families;
}

}  // namespace weft
