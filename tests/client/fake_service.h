// An in-process server of the API over a tiny state machine, for client tests.
// Keeps step order, replays and refusals as training.proto describes them. The
// loss of a request is the number of its data.
#ifndef WEFT_TESTS_CLIENT_FAKE_SERVICE_H_
#define WEFT_TESTS_CLIENT_FAKE_SERVICE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/sampling.grpc.pb.h"
#include "weft/v1/server.grpc.pb.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft::client {

struct FakeRefusal {
  grpc::StatusCode code;
  std::string message;
  int pushback_ms = -1;    // < 0: no hint.
  bool run_first = false;  // The step runs; only its reply is lost.
};

// Shared by the services below. Public members: hold `mu`.
struct FakeState {
  struct Adapter {
    v1::Adapter message;
    // Serialized request and reply by step number.
    std::map<uint64_t, std::pair<std::string, std::string>> replies;
  };

  std::mutex mu;
  std::condition_variable turn;
  bool held = false;  // While true, training waits before its answer.
  std::map<std::string, Adapter> adapters;
  std::map<std::string, v1::Checkpoint> checkpoints;
  std::map<std::string, std::string> files;  // What the last import sent.
  std::deque<FakeRefusal> refusals;          // For the next training calls.
  std::vector<uint64_t> arrived;             // Step numbers, in that order.
  std::vector<uint64_t> applied;
  v1::SampleRequest last_sample;
  std::string authorization;  // What the last GetInfo sent.
};

// A server on a free port of the loopback, until destruction.
class FakeServer {
 public:
  FakeServer();
  ~FakeServer();
  [[nodiscard]] const std::string& target() const { return target_; }
  [[nodiscard]] FakeState& state() { return state_; }
  void Refuse(FakeRefusal refusal);
  void Hold(bool held);
  void SetServing(bool serving);

 private:
  FakeState state_;
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::string target_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace weft::client

#endif  // WEFT_TESTS_CLIENT_FAKE_SERVICE_H_
