// Shifts the wall clock of a program that preloads this library, by the seconds
// in the file WEFT_CLOCK_SHIFT. The file may change while the program runs, as
// an operator or NTP may set the clock.
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>

namespace {

time_t Shift() {
  const char* const path = std::getenv("WEFT_CLOCK_SHIFT");
  std::FILE* const file = path == nullptr ? nullptr : std::fopen(path, "r");
  long long seconds = 0;
  if (file != nullptr) {
    if (std::fscanf(file, "%lld", &seconds) != 1) seconds = 0;
    std::fclose(file);
  }
  return static_cast<time_t>(seconds);
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* now) {
  static const auto real = reinterpret_cast<decltype(&clock_gettime)>(
      dlsym(RTLD_NEXT, "clock_gettime"));
  const int status = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += Shift();
  return status;
}

extern "C" int gettimeofday(timeval* __restrict now, void* __restrict zone) {
  static const auto real = reinterpret_cast<decltype(&gettimeofday)>(
      dlsym(RTLD_NEXT, "gettimeofday"));
  const int status = real(now, zone);
  now->tv_sec += Shift();
  return status;
}

extern "C" time_t time(time_t* out) {
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}
