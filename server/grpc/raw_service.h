// A service whose handlers get each request as bytes, when the header of the
// call has arrived. gRPC would parse a request before any handler runs. Weft
// parses it itself, when it has measured it and charged the caller
// (CallRecord::Parse).
#ifndef WEFT_SERVER_GRPC_RAW_SERVICE_H_
#define WEFT_SERVER_GRPC_RAW_SERVICE_H_

#include <functional>
#include <map>

#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/service_type.h"
#include "server/grpc/call_reactor.h"

namespace weft::server {

// Threads: thread-safe after the last Add. REQUIRES: `core` outlives it.
class RawService final : public grpc::Service {
 public:
  explicit RawService(ServiceCore* core) : core_(core) {}

  // Adds a method whose calls a `Reactor` runs. Its constructor gets the core,
  // the context, the method and copies of `args`.
  template <typename Reactor, typename... Args>
  void Add(Rpc rpc, Args... args) {
    AddHandler(rpc, [this, rpc, args...](grpc::CallbackServerContext* context) {
      return CallReactor::Start<Reactor>(core_, context, rpc, args...);
    });
  }

  // Starts a call, as gRPC does when its header arrives.
  CallReactor* Start(Rpc rpc, grpc::CallbackServerContext* context) {
    return handlers_.at(rpc)(context);
  }

 private:
  using Handler = std::function<CallReactor*(grpc::CallbackServerContext*)>;
  void AddHandler(Rpc rpc, Handler handler);

  ServiceCore* const core_;
  std::map<Rpc, Handler> handlers_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_RAW_SERVICE_H_
