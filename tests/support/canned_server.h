// Runs the real server with a canned engine in the test's process, for tests of
// clients.
#ifndef WEFT_TESTS_SUPPORT_CANNED_SERVER_H_
#define WEFT_TESTS_SUPPORT_CANNED_SERVER_H_

#include <memory>
#include <string>

#include "server/daemon/listeners.h"
#include "tests/support/canned_engine.h"
#include "tests/support/wire_faults.h"

namespace weft {

// Returns the info of a model "toy" with room for long prompts and many
// adapters.
EngineInfo RoomyInfo();

// Listens on a free port of the loopback interface until destruction.
class CannedServer {
 public:
  // `request_memory_bytes` is --request-memory.
  explicit CannedServer(int64_t request_memory_bytes = 0);
  ~CannedServer();
  const std::string& target() const { return listeners_->address(); }
  CannedEngine& engine() { return engine_; }
  WireFaults& wire() { return wire_; }
  // Turns health NOT_SERVING.
  void StartDraining() { listeners_->StartDraining(); }

 private:
  WireFaults& wire_;
  CannedEngine engine_;
  std::unique_ptr<server::Listeners> listeners_;
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_CANNED_SERVER_H_
