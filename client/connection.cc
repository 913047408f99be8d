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
                     absl::string_view adapter_id) {
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  const bool visible =
      std::all_of(adapter_id.begin(), adapter_id.end(),
                  [](unsigned char c) { return absl::ascii_isgraph(c); });
  if (visible && !adapter_id.empty()) {
    context.AddMetadata("weft-adapter-id", std::string(adapter_id));
  }
}

}  // namespace weft::client
