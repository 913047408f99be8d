#include "tests/support/wire_faults.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "grpcpp/impl/server_builder_plugin.h"
#include "grpcpp/support/server_interceptor.h"

namespace weft {
namespace {

using grpc::experimental::InterceptionHookPoints;

constexpr char kRetryHint[] = "grpc-retry-pushback-ms";

class FaultInterceptor final : public grpc::experimental::Interceptor {
 public:
  explicit FaultInterceptor(const std::string& method)
      : rpc_(method.substr(method.rfind('/') + 1)) {}

  void Intercept(
      grpc::experimental::InterceptorBatchMethods* methods) override {
    WireFaults& faults = WireFaults::Install();
    if (methods->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      faults.Received(*methods->GetRecvInitialMetadata());
    }
    if (methods->QueryInterceptionHookPoint(
            InterceptionHookPoints::PRE_SEND_STATUS)) {
      methods->ModifySendStatus(faults.Sending(
          rpc_, methods->GetSendStatus(), methods->GetSendTrailingMetadata()));
    }
    methods->Proceed();
  }

 private:
  const std::string rpc_;
};

class FaultFactory final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new FaultInterceptor(info->method());
  }
};

// Adds the interceptor to every server that is built, so that the server under
// test needs no change. Reflection adds its service in the same way.
class FaultPlugin final : public grpc::ServerBuilderPlugin {
 public:
  std::string name() override { return "weft_wire_faults"; }
  void UpdateServerBuilder(grpc::ServerBuilder* builder) override {
    std::vector<
        std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
        factories;
    factories.push_back(std::make_unique<FaultFactory>());
    builder->experimental().SetInterceptorCreators(std::move(factories));
  }
  void InitServer(grpc::ServerInitializer* /*initializer*/) override {}
  void Finish(grpc::ServerInitializer* /*initializer*/) override {}
  void ChangeArguments(const std::string& /*name*/, void* /*value*/) override {}
};

}  // namespace

WireFaults& WireFaults::Install() {
  // Never destroyed, because servers may outlive static objects.
  static WireFaults* const faults = [] {
    grpc::ServerBuilder::InternalAddPluginFactory(
        []() -> std::unique_ptr<grpc::ServerBuilderPlugin> {
          return std::make_unique<FaultPlugin>();
        });
    return new WireFaults;
  }();
  return *faults;
}

void WireFaults::Reset() {
  MutexLock lock(&mu_);
  lost_.clear();
  retry_hint_.reset();
  authorization_.clear();
  adapter_id_.clear();
}

void WireFaults::LoseReply(std::string rpc, grpc::Status instead) {
  MutexLock lock(&mu_);
  lost_.emplace_back(std::move(rpc), std::move(instead));
}

void WireFaults::SetRetryHint(std::optional<int> milliseconds) {
  MutexLock lock(&mu_);
  retry_hint_ = milliseconds;
}

std::string WireFaults::authorization() const {
  MutexLock lock(&mu_);
  return authorization_;
}

std::string WireFaults::adapter_id() const {
  MutexLock lock(&mu_);
  return adapter_id_;
}

std::string WireFaults::checkpoint() const {
  MutexLock lock(&mu_);
  return checkpoint_;
}

void WireFaults::Received(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  MutexLock lock(&mu_);
  const auto token = metadata.find("authorization");
  if (token != metadata.end()) {
    authorization_.assign(token->second.begin(), token->second.end());
  }
  const auto value = [&metadata](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end()
               ? std::string()
               : std::string(found->second.begin(), found->second.end());
  };
  adapter_id_ = value("weft-adapter-id");
  checkpoint_ = value("weft-checkpoint");
}

grpc::Status WireFaults::Sending(const std::string& rpc,
                                 const grpc::Status& status,
                                 Metadata* trailers) {
  MutexLock lock(&mu_);
  grpc::Status sent = status;
  const auto lost =
      std::ranges::find(lost_, rpc, [](const auto& l) { return l.first; });
  if (status.ok() && lost != lost_.end()) {
    sent = lost->second;
    trailers->erase("weft-trace-id");  // What gRPC itself says has none.
    lost_.erase(lost);
  }
  if (sent.ok()) return sent;
  trailers->erase(kRetryHint);
  if (retry_hint_) {
    trailers->emplace(kRetryHint, std::to_string(*retry_hint_));
  }
  return sent;
}

}  // namespace weft
