// fake_weftd: the daemon over a canned engine, for tests of clients in another
// language. Takes weftd's flags, writes its port file and ends on SIGTERM.
//
// A test sends a fault as a line of JSON on stdin. fake_weftd sets the fault,
// and then answers with a line of JSON on stdout.
//
//   {"do": "refuse", "rpc": "OptimStep", "code": 8, "message": "full"}
//   {"do": "fail_run", ...}   the step fails when it is run
//   {"do": "lose_reply", ...} the call runs; its caller gets the code
//   {"do": "hint", "ms": 20} the retry hint of refusals; null: none
//   {"do": "hold"}, {"do": "release"}
//   {"do": "export", "files": {"name": "text"}} the files of the next export
//   {"do": "calls"}           the answer: {"arrived": [["OptimStep", 1]],
//                             "applied": []}
//
// The end of stdin ends fake_weftd, too, so that it does not outlive its test.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"
#include "server/daemon/daemon.h"
#include "tests/support/canned_engine.h"
#include "tests/support/canned_server.h"
#include "tests/support/wire_faults.h"

namespace weft {
namespace {

using nlohmann::json;

constexpr int kExitBadConfig = 2;

json Calls(const CannedEngine& engine) {
  return {{"arrived", engine.seen().arrived},
          {"applied", engine.seen().applied}};
}

// Executes a line. Throws nlohmann::json's exceptions.
json Obey(const json& line, CannedEngine& engine) {
  const std::string what = line.at("do");
  const std::string rpc = line.value("rpc", "");
  const int code = line.value("code", 0);
  const std::string message = line.value("message", "");
  const absl::Status status(static_cast<absl::StatusCode>(code), message);
  WireFaults& wire = WireFaults::Install();
  if (what == "calls") return Calls(engine);
  if (what == "refuse") {
    engine.FailNext(status, rpc);
  } else if (what == "fail_run") {
    engine.FailNextRun(status, rpc);
  } else if (what == "lose_reply") {
    wire.LoseReply(rpc, {static_cast<grpc::StatusCode>(code), message});
  } else if (what == "hint") {
    const json& ms = line.at("ms");
    wire.SetRetryHint(ms.is_null() ? std::nullopt : std::optional<int>(ms));
  } else if (what == "hold") {
    engine.Hold();
  } else if (what == "release") {
    engine.Release();
  } else if (what == "export") {
    PeftFiles files;
    for (const auto& [name, text] : line.at("files").items()) {
      files.emplace_back(name, text);
    }
    engine.ExportNext(std::move(files));
  } else {
    return {{"error", "unknown: " + what}};
  }
  return {{"ok", true}};
}

void ObeyLines(CannedEngine& engine) {
  for (std::string line; std::getline(std::cin, line);) {
    json answer;
    try {
      answer = Obey(json::parse(line), engine);
    } catch (const json::exception& e) {
      answer = {{"error", e.what()}};
    }
    std::cout << answer.dump() << std::endl;
  }
  kill(getpid(), SIGTERM);
}

int Serve(const std::vector<std::string>& arguments) {
  const auto no_environment = [](const std::string&) {
    return std::optional<std::string>();
  };
  const absl::StatusOr<server::Settings> settings =
      server::ParseSettings(arguments, no_environment);
  if (!settings.ok()) {
    std::cerr << settings.status() << std::endl;
    return kExitBadConfig;
  }
  WireFaults::Install();
  server::LocalRanks none;
  return server::RunDaemon(
      *settings,
      [](const EngineOptions&, prometheus::Registry*, const engine::OnStandby&)
          -> absl::StatusOr<std::unique_ptr<engine::Engine>> {
        auto engine = std::make_unique<CannedEngine>(RoomyInfo());
        std::thread([&engine = *engine] { ObeyLines(engine); }).detach();
        return engine;
      },
      &none);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const int status =
      weft::Serve(std::vector<std::string>(argv + 1, argv + argc));
  std::fflush(nullptr);
  // The thread that reads stdin may still wait for a line, so do not join it.
  std::_Exit(status);
}
