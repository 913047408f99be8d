// A connection to one server.
#ifndef WEFT_CLIENT_CONNECTION_H_
#define WEFT_CLIENT_CONNECTION_H_

#include <memory>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/sampling.grpc.pb.h"
#include "weft/v1/server.grpc.pb.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft::client {

// The methods of the services that take a callback.
using Adapters = class v1::AdapterService::Stub::async;
using Sampling = class v1::SamplingService::Stub::async;
using Server = class v1::ServerService::Stub::async;
using Training = class v1::TrainingService::Stub::async;

// Holds a channel and its stubs. Closing a channel waits for the threads that
// run gRPC's callbacks, so a callback must not close it. If a callback releases
// the last reference to a Connection, the destructor closes the channel on
// another thread.
// Threads: any.
class Connection {
 public:
  explicit Connection(std::shared_ptr<grpc::Channel> channel);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::AdapterService::Stub& adapters() { return *adapters_; }
  v1::SamplingService::Stub& sampling() { return *sampling_; }
  v1::ServerService::Stub& server() { return *server_; }
  // Returns the stub that has the methods of `Methods`, one of the above.
  template <typename Methods>
  Methods* async() {
    if constexpr (std::is_same_v<Methods, Adapters>) return adapters_->async();
    if constexpr (std::is_same_v<Methods, Sampling>) return sampling_->async();
    if constexpr (std::is_same_v<Methods, Server>) return server_->async();
    if constexpr (std::is_same_v<Methods, Training>) return training_->async();
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AdapterService::Stub> adapters_;
  std::unique_ptr<v1::SamplingService::Stub> sampling_;
  std::unique_ptr<v1::ServerService::Stub> server_;
  std::unique_ptr<v1::TrainingService::Stub> training_;
};

// Marks this thread as one that runs a callback of gRPC, until the end of the
// scope. Declare it before the variables that the callback destroys, so that
// the thread is still marked when they are destroyed.
class CallbackScope {
 public:
  CallbackScope();
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

 private:
  const bool outer_;
};

// Adds the token as `authorization: Bearer ...`, the adapter's id as
// `weft-adapter-id`, and the checkpoint from which a call samples as
// `weft-checkpoint`. A proxy in front of several servers finds the server that
// has the adapter, or any one that samples. Omits empty values. Also omits
// names with characters other than visible ASCII, because every server refuses
// such a name.
void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id,
                     absl::string_view checkpoint = "");

}  // namespace weft::client

#endif  // WEFT_CLIENT_CONNECTION_H_
