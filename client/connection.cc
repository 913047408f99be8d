#include "client/connection.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"

namespace weft::client {
namespace {

thread_local bool in_callback = false;

}  // namespace

CallbackScope::CallbackScope() : outer_(std::exchange(in_callback, true)) {}

CallbackScope::~CallbackScope() { in_callback = outer_; }

Connection::Connection(std::shared_ptr<grpc::Channel> channel)
    : channel_(std::move(channel)),
      adapters_(v1::AdapterService::NewStub(channel_)),
      sampling_(v1::SamplingService::NewStub(channel_)),
      server_(v1::ServerService::NewStub(channel_)),
      training_(v1::TrainingService::NewStub(channel_)) {}

Connection::~Connection() {
  adapters_.reset();
  sampling_.reset();
  server_.reset();
  training_.reset();
  if (!in_callback) return;
  std::thread([channel = std::move(channel_)]() mutable {
    channel.reset();
  }).detach();
}

void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id,
                     absl::string_view checkpoint) {
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  const auto add = [&context](const char* key, absl::string_view name) {
    if (name.empty() || !std::ranges::all_of(name, absl::ascii_isgraph)) return;
    context.AddMetadata(key, std::string(name));
  };
  add("weft-adapter-id", adapter_id);
  add("weft-checkpoint", checkpoint);
}

}  // namespace weft::client
