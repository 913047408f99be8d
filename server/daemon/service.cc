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

extern "C" int WeftServe(const weft::server::Settings* settings,
                         const weft::World* world,
                         weft::server::LocalRanks* others) {
  if (world->rank > 0) {
    return weft::server::RunWorkerProcess(
        *settings, [&](const weft::EngineOptions& options,
                       const std::function<void()>& met) {
          return weft::engine::RunRemoteWorker(options, *world, met);
        });
  }
  return weft::server::RunDaemon(
      *settings,
      [&](const weft::EngineOptions& options, prometheus::Registry* registry,
          const weft::engine::OnStandby& on_standby) {
        return weft::engine::StartEngine(options, *world, registry, on_standby);
      },
      others);
}

namespace {

absl::Status CheckStart(const weft::server::Settings& settings) {
  const std::string& tokens = settings.server.auth_tokens_file;
  if (!tokens.empty()) {
    prometheus::Registry unused;
    WEFT_RETURN_IF_ERROR(
        weft::server::Authenticator::Start(tokens, &unused).status());
  }
  if (settings.device_memory_bytes == 0) {
    return weft::engine::CheckStart(settings.engine);
  }
  WEFT_ASSIGN_OR_RETURN(const std::string text,
                        weft::engine::DescribeMemory(
                            settings.engine, settings.device_memory_bytes));
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

extern "C" int WeftCheckStart(const weft::server::Settings* settings) {
  const absl::Status status = CheckStart(*settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "weftd: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}
