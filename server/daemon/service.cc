// The entry points of weftd.so, which weftd opens with dlopen.
#include "server/daemon/service.h"

#include <cstdio>
#include <functional>
#include <string>

#include "prometheus/registry.h"
#include "server/call/authenticator.h"
#include "server/daemon/daemon.h"
#include "src/base/status_macros.h"
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

namespace {

absl::Status CheckStart(const weft::Settings& settings) {
  const std::string& tokens = settings.server.auth_tokens_file;
  if (!tokens.empty()) {
    prometheus::Registry unused;
    WEFT_RETURN_IF_ERROR(weft::Authenticator::Start(tokens, &unused).status());
  }
  if (settings.device_memory_bytes == 0) {
    return weft::CheckStart(settings.engine);
  }
  WEFT_ASSIGN_OR_RETURN(
      const std::string text,
      weft::DescribeMemory(settings.engine, settings.device_memory_bytes));
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

extern "C" int WeftCheckStart(const weft::Settings* settings) {
  const absl::Status status = CheckStart(*settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "weftd: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}
