#include "tests/support/canned_server.h"

#include "src/base/observe/log.h"

namespace weft {

EngineInfo RoomyInfo() {
  EngineInfo info = CannedInfo();
  info.context_length = 4 << 20;
  info.max_adapters = 1024;
  info.has_byte_decoder = true;
  return info;
}

CannedServer::CannedServer(int64_t request_memory_bytes)
    : wire_(WireFaults::Install()), engine_(RoomyInfo()) {
  SetLogLevel(LogLevel::kError);
  wire_.Reset();
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.metrics_listen = "";
  options.model_name = "toy";
  options.request_memory_bytes = request_memory_bytes;
  // If the server cannot listen, value() ends the test and reports why.
  listeners_ = server::Listeners::Start(
                   options, std::make_shared<prometheus::Registry>())
                   .value();
  listeners_->SetEngine(&engine_);
}

CannedServer::~CannedServer() {
  // The shutdown waits for held work, so this releases the work first.
  engine_.Release();
  listeners_->Shutdown(absl::ZeroDuration());
}

}  // namespace weft
