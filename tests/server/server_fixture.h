// A server in this process over a canned engine, and stubs to call it.
#ifndef WEFT_TESTS_SERVER_SERVER_FIXTURE_H_
#define WEFT_TESTS_SERVER_SERVER_FIXTURE_H_

#include <functional>
#include <memory>
#include <string>

#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "server/daemon/listeners.h"
#include "tests/server/wire/message_edit.h"
#include "tests/support/canned_engine.h"
#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/sampling.grpc.pb.h"
#include "weft/v1/server.grpc.pb.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft::server {

class ServerTest : public ::testing::Test {
 protected:
  ServerTest();
  ~ServerTest() override;

  // Returns options with small limits and free ports.
  static ServerOptions TestOptions();
  // Returns options with a metrics page.
  static ServerOptions MetricsOptions();

  void StartServer(const ServerOptions& options = TestOptions(),
                   TokenizerFiles tokenizer = {});
  void AttachEngine() { listeners_->SetEngine(&engine_); }
  // Starts the server, attaches the engine and creates an adapter "a".
  void StartReadyServer(const ServerOptions& options = TestOptions());

  // Returns a valid request for adapter "a": one sequence of three tokens.
  static v1::ForwardBackwardRequest GoodStep();

  // Calls the method that takes such a request. The response may be null, and
  // the call has a context of its own if `context` is null.
  grpc::Status Send(const google::protobuf::Message& request,
                    google::protobuf::Message* response = nullptr,
                    grpc::ClientContext* context = nullptr) const;
  // Returns the response to a request that the server accepts.
  template <typename Response>
  Response Answer(const google::protobuf::Message& request) const {
    Response response;
    const grpc::Status status = Send(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  // Waits up to 30 s for `condition`. Returns whether it became true.
  static bool Eventually(const std::function<bool()>& condition);

  // Returns "STATUS BODY" of a path of the metrics port. `authorization` is the
  // value of that header.
  std::string Fetch(const std::string& path,
                    const std::string& authorization = "") const;
  // Returns the whole reply. `header` has lines that end in CRLF.
  std::string FetchAll(const std::string& path,
                       const std::string& header) const;
  // Return the metrics page, and the value of one of its samples (-1 if it is
  // not there).
  std::string Scrape() const { return Fetch("/metrics").substr(4); }
  double MetricValue(const std::string& sample) const;

  // Members are destroyed in reverse order, so the server ends before the
  // engine that it calls.
  CannedEngine engine_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<Listeners> listeners_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::TrainingService::Stub> training_;
  std::unique_ptr<v1::SamplingService::Stub> sampling_;
  std::unique_ptr<v1::AdapterService::Stub> adapters_;
  std::unique_ptr<v1::ServerService::Stub> server_;
};

// Returns the health of a service by grpc.health.v1, or minus the status code
// if the check fails.
inline constexpr int kServing = 1;
inline constexpr int kNotServing = 2;
int HealthOf(const std::shared_ptr<grpc::Channel>& channel,
             const std::string& service);

// Floats converts little-endian bytes to f32. Raw converts values to bytes.
std::vector<float> Floats(const std::string& raw);
template <typename T>
std::string Raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

// Returns the value of a trailer, or "".
std::string Trailer(const grpc::ClientContext& context, const std::string& key);

}  // namespace weft::server

#endif  // WEFT_TESTS_SERVER_SERVER_FIXTURE_H_
