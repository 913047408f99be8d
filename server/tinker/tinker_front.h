// The Tinker API: HTTP in, the engine's calls out. See README.md beside this.
#ifndef WEFT_SERVER_TINKER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_TINKER_FRONT_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/service_core.h"

namespace weft::tinker {

// Threads: one makes and destroys it; EngineIsReady from any.
class TinkerFront {
 public:
  // Listens on core->options.tinker_listen at once, and takes up what it kept
  // under options.state_dir. `core` outlives it and the calls it makes.
  // Errors: UNAVAILABLE when the address cannot be listened on; those of
  // Ledger::Open.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<TinkerFront>> Start(
      ServiceCore* core);

  // Closes all connections.
  ~TinkerFront();
  TinkerFront(const TinkerFront&) = delete;
  TinkerFront& operator=(const TinkerFront&) = delete;

  // HOST:PORT with the port that was chosen.
  [[nodiscard]] const std::string& address() const { return address_; }

  // Runs the steps again that were promised when the last process ended.
  void EngineIsReady();

 private:
  class Impl;
  TinkerFront(std::unique_ptr<Impl> impl, std::string address);

  const std::unique_ptr<Impl> impl_;
  const std::string address_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_TINKER_FRONT_H_
