// The entry points of weftd.so, which weftd opens with dlopen.
#include "server/daemon/service.h"

#include <cstdio>
#include <functional>
#include <string>

#include "server/daemon/daemon.h"
#include "src/engine/engine.h"

extern "C" int WeftServe(const weft::Settings* settings,
                         const weft::World* world, weft::LocalRanks* others) {
  if (world->rank > 0) {
    return weft::RunWorkerProcess(
        *settings, [&](const weft::EngineOptions& options,
                       const std::function<void()>& met) {
          return weft::RunRemoteWorker(options, *world, met);
        });
  }
  return weft::RunDaemon(
      *settings,
      [&](const weft::EngineOptions& options, prometheus::Registry* registry) {
        return weft::StartEngine(options, *world, registry);
      },
      others);
}

extern "C" int WeftDescribeMemory(const weft::Settings* settings) {
  const absl::StatusOr<std::string> text =
      weft::DescribeMemory(settings->engine, settings->device_memory_bytes);
  if (text.ok()) {
    std::fputs(text->c_str(), stdout);
    return 0;
  }
  std::fprintf(stderr, "weftd: %s\n",
               std::string(text.status().message()).c_str());
  return absl::IsInvalidArgument(text.status()) ? 2 : 1;
}
