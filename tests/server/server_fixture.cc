#include "tests/server/server_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/impl/client_unary_call.h"
#include "prometheus/text_serializer.h"
#include "src/base/address.h"
#include "src/base/options/options.h"

namespace weft::server {

ServerTest::ServerTest() = default;
ServerTest::~ServerTest() = default;

ServerOptions ServerTest::TestOptions() {
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.metrics_listen = "";
  options.model_name = "toy";
  options.max_message_bytes = 4 << 20;
  options.max_import_bytes = 4 << 20;
  options.max_data_per_request = 3;
  options.max_tokens_per_request = 40;
  options.max_samples = 8;
  return options;
}

ServerOptions ServerTest::MetricsOptions() {
  ServerOptions options = TestOptions();
  options.metrics_listen = "127.0.0.1:0";
  return options;
}

void ServerTest::StartServer(const ServerOptions& options,
                             TokenizerFiles tokenizer) {
  registry_ = std::make_shared<prometheus::Registry>();
  listeners_ =
      Listeners::Start(options, registry_, std::move(tokenizer)).value();
  channel_ = grpc::CreateChannel(listeners_->address(),
                                 grpc::InsecureChannelCredentials());
  training_ = v1::TrainingService::NewStub(channel_);
  sampling_ = v1::SamplingService::NewStub(channel_);
  adapters_ = v1::AdapterService::NewStub(channel_);
  server_ = v1::ServerService::NewStub(channel_);
}

void ServerTest::StartReadyServer(const ServerOptions& options) {
  ASSERT_NO_FATAL_FAILURE(StartServer(options));
  AttachEngine();
  const auto request = Make<v1::CreateAdapterRequest>("adapter_id = 'a'");
  const grpc::Status status = Send(request);
  ASSERT_TRUE(status.ok()) << status.error_message();
}

v1::ForwardBackwardRequest ServerTest::GoodStep() {
  return Make<v1::ForwardBackwardRequest>(
      "adapter_id = 'a'; loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
      "data += {tokens: [1, 2, 3] targets: [2, 3, 4]}");
}

grpc::Status ServerTest::Send(const google::protobuf::Message& request,
                              google::protobuf::Message* response,
                              grpc::ClientContext* context) const {
  const auto& type = *request.GetDescriptor();
  const auto& service = *type.file()->service(0);
  int i = 0;
  while (service.method(i)->input_type() != &type) ++i;
  const std::string path =
      absl::StrCat("/", service.full_name(), "/", service.method(i)->name());
  const std::unique_ptr<google::protobuf::Message> unread(
      google::protobuf::MessageFactory::generated_factory()
          ->GetPrototype(service.method(i)->output_type())
          ->New());
  grpc::ClientContext own;
  return grpc::internal::BlockingUnaryCall(
      channel_.get(),
      {path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, channel_},
      context == nullptr ? &own : context, request,
      response == nullptr ? unread.get() : response);
}

bool ServerTest::Eventually(const std::function<bool()>& condition) {
  const absl::Time limit = absl::Now() + absl::Seconds(30);
  while (!condition()) {
    if (absl::Now() > limit) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

std::string ServerTest::FetchAll(const std::string& path,
                                 const std::string& header) const {
  const auto address =
      ParseHostPort("metrics-listen", listeners_->metrics_address());
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(static_cast<uint16_t>(address->port));
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string reply;
  if (connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.0\r\n", header, "\r\n");
    (void)!write(fd, request.data(), request.size());
    char buffer[4096];
    for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
      reply.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  return reply;
}

std::string ServerTest::Fetch(const std::string& path,
                              const std::string& authorization) const {
  const std::string reply =
      FetchAll(path, absl::StrCat("Authorization: ", authorization, "\r\n"));
  const size_t body = reply.find("\r\n\r\n");
  if (body == std::string::npos) return "";
  // "HTTP/1.1 200 OK" has its status at 9.
  return absl::StrCat(reply.substr(9, 3), " ", reply.substr(body + 4));
}

double ServerTest::MetricValue(const std::string& sample) const {
  const std::string page =
      prometheus::TextSerializer().Serialize(registry_->Collect());
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, absl::StrCat(sample, " ")) &&
        absl::SimpleAtod(line.substr(sample.size() + 1), &value)) {
      return value;
    }
  }
  return -1;
}

int HealthOf(const std::shared_ptr<grpc::Channel>& channel,
             const std::string& service) {
  // The wrapper types have the same encoding as the messages of the health
  // check.
  grpc::TemplatedGenericStub<google::protobuf::StringValue,
                             google::protobuf::Int32Value>
      stub(channel);
  google::protobuf::StringValue request;
  request.set_value(service);
  google::protobuf::Int32Value response;
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(
      &context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status.ok() ? response.value()
                     : -static_cast<int>(status.error_code());
}

std::vector<float> Floats(const std::string& raw) {
  std::vector<float> values(raw.size() / sizeof(float));
  std::memcpy(values.data(), raw.data(), values.size() * sizeof(float));
  return values;
}

std::string Trailer(const grpc::ClientContext& context,
                    const std::string& key) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(key);
  if (found == trailers.end()) return "";
  return {found->second.data(), found->second.size()};
}

}  // namespace weft::server
