// weftd: reads flags, then runs the service of weftd.so.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/daemon/service.h"
#include "server/flags/config_file.h"
#include "server/flags/flags.h"
#include "server/flags/local_ranks.h"
#include "server/flags/thread_room.h"
#include "server/flags/version.h"
#include "src/base/huge_pages.h"
#include "src/base/options/world.h"

namespace {

constexpr int kExitCannotStart = 1;
constexpr int kExitBadConfig = 2;

// About as many threads as a process has that serves on two cores.
constexpr int kThreads = 32;

// Opens the standard descriptors on /dev/null if they are closed. Otherwise the
// first files and sockets would take their numbers, and get the log's lines.
void OpenStandardDescriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) (void)!::open("/dev/null", O_RDWR);
  }
}
// Runs before the initializers of libraries, which open descriptors, too.
using Initializer = void (*)();
__attribute__((section(".preinit_array"), used)) Initializer g_first =
    OpenStandardDescriptors;

void PrintLines(const absl::Status& status) {
  for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) {
    std::fprintf(stderr, "weftd: %.*s\n", static_cast<int>(line.size()),
                 line.data());
  }
}

// Sets environment variables before LibTorch and its libraries read them. Keeps
// the values that the operator has set.
void SetLibraryDefaults() {
  // Compute threads that wait for each other spin for some microseconds, then
  // sleep. Longer spinning gains nothing on idle cores. On shared cores, it
  // takes time from other threads. The count would overrule OMP_WAIT_POLICY.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) {
    ::setenv("GOMP_SPINCOUNT", "20000", /*replace=*/0);
  }
}

// Gives the allocator memory in huge pages for what LibTorch's initializers
// allocate: 43 MB in small pieces, and the kernel would clear and map each page
// of 4 KiB by itself.
void ReserveHeap() {
  constexpr size_t kBytes = size_t{64} << 20;
  auto* const block = static_cast<std::byte*>(std::malloc(kBytes));
  if (block == nullptr) return;
  weft::PreferHugePages({block, kBytes});
  std::free(block);
}

// How libraries are loaded. LibTorch calls 31,000 of its functions by name, so
// a server looks each up at its first call. weftd.so is linked with -z now, so
// a LibTorch that lacks a function of weftd.so is an error at the start.
// --check-config also finds what LibTorch's own libraries lack.
constexpr int kToServe = RTLD_LAZY | RTLD_GLOBAL;
constexpr int kToCheck = RTLD_NOW | RTLD_GLOBAL;

// Loads the libraries of the torch package in `folder`, so that weftd.so uses
// them. If that fails, prints a message on stderr and returns false. `mode` is
// kToServe or kToCheck.
bool LoadTorch(const std::string& folder, int mode) {
#if WEFT_WITH_CUDA
  constexpr std::array kLibraries = {"libc10.so", "libtorch_cpu.so",
                                     "libc10_cuda.so", "libtorch_cuda.so"};
#else
  constexpr std::array kLibraries = {"libc10.so", "libtorch_cpu.so"};
#endif
  for (const char* const name : kLibraries) {
    const std::string path = folder + "/lib/" + name;
    if (::dlopen(path.c_str(), mode) == nullptr) {
      std::fprintf(stderr, "weftd: --torch-dir=%s: %s\n", folder.c_str(),
                   ::dlerror());
      return false;
    }
  }
  return true;
}

// Returns the world of this process: its rank and how to reach the others.
// Starts the other ranks, unless torchrun or another launcher started them. In
// a process that it starts, it returns, too.
absl::StatusOr<weft::World> MakeWorld(const weft::EngineOptions& options,
                                      weft::server::LocalRanks* others) {
  const int size = options.tensor_parallel_size * options.data_parallel_size;
  // A server of one rank ignores variables such as RANK, because they may
  // belong to an outer job.
  if (size == 1) return weft::World();
  absl::StatusOr<std::optional<weft::World>> given =
      weft::WorldFromEnvironment(weft::server::ProcessEnvironment());
  if (!given.ok()) return given.status();
  if (given->has_value()) {
    const absl::Status fits = weft::CheckWorldSize(
        **given, options.tensor_parallel_size, options.data_parallel_size);
    if (!fits.ok()) return fits;
    return **given;
  }
  weft::World world;
  absl::StatusOr<weft::server::LocalRanks> spawned =
      weft::server::LocalRanks::Spawn(size, &world);
  if (!spawned.ok()) return spawned.status();
  *others = *std::move(spawned);
  return world;
}

// Loads LibTorch and returns the function `name` of weftd.so. If that fails,
// prints a message on stderr and returns null.
void* FindInService(const weft::ServerOptions& options, const char* name,
                    int mode) {
  ReserveHeap();
  if (!options.torch_dir.empty() && !LoadTorch(options.torch_dir, mode)) {
    return nullptr;
  }
  // dlopen finds weftd.so by this binary's RPATH. The LibTorch libraries that
  // weftd.so loads use each other's symbols. RTLD_GLOBAL applies to these
  // libraries too.
  void* const library = ::dlopen("weftd.so", mode);
  void* const function = library == nullptr ? nullptr : ::dlsym(library, name);
  if (function == nullptr) {
    const absl::string_view error = ::dlerror();
    const bool is_torch = absl::StrContains(error, "libtorch") ||
                          absl::StrContains(error, "libc10");
    std::fprintf(stderr, "weftd: %s%s\n", error.data(),
                 is_torch ? "; install the package torch of the version that "
                            "weftd was built with (pip install torch==...), or "
                            "name its folder with --torch-dir"
                          : "");
  }
  return function;
}

int CheckConfig(const weft::server::Settings& settings) {
  if (!settings.unknown_variables.empty()) {
    PrintLines(absl::InvalidArgumentError(
        absl::StrJoin(settings.unknown_variables, "\n")));
    return kExitBadConfig;
  }
  SetLibraryDefaults();
  void* const check =
      FindInService(settings.server, "WeftCheckStart", kToCheck);
  if (check == nullptr) return kExitCannotStart;
  const int status =
      reinterpret_cast<decltype(&WeftCheckStart)>(check)(&settings);
  if (status == 0) std::puts("configuration is good");
  return status;
}

// Says what is wrong if this process may not have its threads.
bool HasThreadRoom() {
  const absl::Status room = weft::server::CheckThreads(kThreads);
  if (!room.ok()) PrintLines(room);
  return room.ok();
}

int Serve(const weft::server::Settings& settings) {
  if (!HasThreadRoom()) return kExitCannotStart;
  SetLibraryDefaults();
  // Before the other ranks are started, so that LibTorch is loaded once.
  void* const serve = FindInService(settings.server, "WeftServe", kToServe);
  if (serve == nullptr) return kExitCannotStart;
  weft::server::LocalRanks others;
  const absl::StatusOr<weft::World> world = MakeWorld(settings.engine, &others);
  if (!world.ok()) {
    PrintLines(world.status());
    return absl::IsInvalidArgument(world.status()) ? kExitBadConfig
                                                   : kExitCannotStart;
  }
  if (world->rank > 0 && !HasThreadRoom()) return kExitCannotStart;
  return reinterpret_cast<decltype(&WeftServe)>(serve)(&settings, &*world,
                                                       &others);
}

int PrintHelp(const std::string& word) {
  const std::string text = weft::server::HelpText(word);
  std::fputs(text.c_str(), stdout);
  if (!text.empty()) return 0;
  std::fprintf(stderr, "weftd: no flag is about '%s'; see --help\n",
               word.c_str());
  return kExitBadConfig;
}

}  // namespace

int main(int argc, char** argv) {
  absl::StatusOr<weft::server::Settings> settings = weft::server::ParseSettings(
      std::vector<std::string>(argv + 1, argv + argc),
      weft::server::ProcessEnvironment());
  if (!settings.ok()) {
    PrintLines(settings.status());
    return kExitBadConfig;
  }
  if (settings->help) return PrintHelp(settings->help_word);
  settings->unknown_variables = weft::server::UnknownVariables(environ);
  if (settings->version) {
    std::fputs(weft::server::VersionText().c_str(), stdout);
    return 0;
  }
  const absl::Status valid = weft::server::ValidateSettings(*settings);
  if (!valid.ok()) {
    PrintLines(valid);
    return kExitBadConfig;
  }
  if (settings->print_config) {
    std::fputs(weft::server::ConfigText(*settings).c_str(), stdout);
    return 0;
  }
  if (settings->check_config) return CheckConfig(*settings);
  const int status = Serve(*settings);
  // Skips LibTorch's static destructors. They take a third of a second and free
  // only memory that the end of the process frees anyway.
  std::fflush(nullptr);
  std::_Exit(status);
}
