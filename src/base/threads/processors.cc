#include "src/base/threads/processors.h"

#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "src/base/clock.h"

namespace weft {
namespace {

absl::Duration ProcessTime() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

}  // namespace

std::optional<ProcessorShare::Reading> ProcessorShare::Read() const {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return std::nullopt;
  Reading reading = {.time = SteadyNow(), .idle = {}, .used = ProcessTime()};
  int found = 0;
  std::ifstream file(root_ + "/proc/stat");
  for (std::string line; std::getline(file, line);) {
    // cpuN user nice system idle iowait ...
    std::istringstream fields(line);
    std::string name;
    int64_t user = 0, nice = 0, system = 0, idle = 0, iowait = 0;
    fields >> name >> user >> nice >> system >> idle >> iowait;
    absl::string_view number = name;
    if (fields.fail() || !absl::ConsumePrefix(&number, "cpu")) break;
    uint32_t processor = 0;
    if (!absl::SimpleAtoi(number, &processor)) continue;  // The sum of all.
    if (processor >= CPU_SETSIZE || !CPU_ISSET(processor, &allowed)) continue;
    ++found;
    reading.idle += absl::Seconds(1) * (idle + iowait) / sysconf(_SC_CLK_TCK);
  }
  if (found == 0) return std::nullopt;
  return reading;
}

std::optional<double> ProcessorShare::Look() {
  const std::optional<Reading> now = Read();
  const std::optional<Reading> last = std::exchange(last_, now);
  if (!now || !last || now->time <= last->time) return std::nullopt;
  return absl::FDivDuration(now->idle - last->idle + now->used - last->used,
                            now->time - last->time);
}

}  // namespace weft
