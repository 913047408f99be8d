#include "client/weft_client.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/peft_folder.h"
#include "client/retry.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace weft::client {
namespace {

// Sends `request`, which holds the options. Then sends the folder's files,
// which `read_folder` reads (peft_folder.h). Returns the status of the call.
// Errors: those of `read_folder`.
template <typename Request, typename Read>
absl::StatusOr<grpc::Status> SendFiles(grpc::ClientWriter<Request>& writer,
                                       grpc::ClientContext& context,
                                       Request request,
                                       const std::string& folder,
                                       Read read_folder) {
  writer.Write(request);
  const absl::Status read =
      read_folder(folder, [&](const v1::FileChunk& chunk) {
        *request.mutable_chunk() = chunk;
        return writer.Write(request);
      });
  if (!read.ok()) context.TryCancel();
  writer.WritesDone();
  const grpc::Status status = writer.Finish();
  if (!read.ok()) return read;
  return status;
}

// Writes the files that `reader` receives to `folder`. Returns the status of
// the call. Errors: those of PeftFolderWriter.
template <typename Response>
absl::StatusOr<grpc::Status> ReceiveFiles(grpc::ClientReader<Response>& reader,
                                          grpc::ClientContext& context,
                                          const std::string& folder) {
  PeftFolderWriter writer(folder);
  Response response;
  absl::Status written;
  while (written.ok() && reader.Read(&response)) {
    written = writer.Add(response.chunk());
  }
  if (!written.ok()) context.TryCancel();
  const grpc::Status status = reader.Finish();
  if (!written.ok()) return written;
  if (status.ok()) WEFT_RETURN_IF_ERROR(writer.Commit());
  return status;
}

template <typename Request>
Request OfAdapter(absl::string_view adapter_id) {
  Request request;
  request.set_adapter_id(std::string(adapter_id));
  return request;
}

// Also removes adapters that two servers list.
void OrderById(google::protobuf::RepeatedPtrField<v1::Adapter>& adapters) {
  std::sort(adapters.begin(), adapters.end(),
            [](const v1::Adapter& a, const v1::Adapter& b) {
              return a.adapter_id() < b.adapter_id();
            });
  const auto rest = std::unique(adapters.begin(), adapters.end(),
                                [](const v1::Adapter& a, const v1::Adapter& b) {
                                  return a.adapter_id() == b.adapter_id();
                                });
  adapters.erase(rest, adapters.end());
}

// Messages are little-endian, as are x86-64 and AArch64.
template <typename T>
std::string ToRaw(const std::vector<T>& values) {
  static_assert(sizeof(T) == 4);
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

}  // namespace

v1::Datum MakeDatum(const std::vector<uint32_t>& tokens,
                    const std::vector<uint32_t>& targets,
                    const std::vector<float>& weights) {
  v1::Datum datum;
  datum.set_tokens_le(ToRaw(tokens));
  datum.set_targets_le(ToRaw(targets));
  datum.set_weights_le(ToRaw(weights));
  return datum;
}

absl::StatusOr<v1::Datum> NextTokenDatum(const std::vector<uint32_t>& tokens,
                                         size_t prompt_length) {
  if (tokens.size() < 2 || prompt_length > tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sequence of ", tokens.size(), " tokens, ",
                     prompt_length, " of them prompt: nothing to learn"));
  }
  std::vector<float> weights(tokens.size() - 1, 1.0F);
  for (size_t i = 0; i + 1 < prompt_length; ++i) weights[i] = 0.0F;
  return MakeDatum({tokens.begin(), tokens.end() - 1},
                   {tokens.begin() + 1, tokens.end()}, weights);
}

std::vector<float> ReadFloats(absl::string_view raw) {
  std::vector<float> values(raw.size() / sizeof(float));
  std::memcpy(values.data(), raw.data(), values.size() * sizeof(float));
  return values;
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  WEFT_ASSIGN_OR_RETURN(auto route,
                        Route::Create(options.target, options.security));
  // make_unique cannot call the private constructor.
  return std::unique_ptr<Client>(
      new Client(std::move(options), std::move(route)));
}

CallOptions Client::call_options(bool repeat) const {
  CallOptions options{options_.timeout, options_.retry, options_.security.token,
                      route_->answered()};
  if (!repeat) options.retry.max_attempts = 1;
  return options;
}

absl::Status Client::Once(absl::string_view adapter_id, const Attempt& attempt,
                          absl::string_view checkpoint) const {
  const absl::Time deadline = SteadyNow() + options_.timeout;
  Trip trip(route_, std::string(adapter_id));
  while (true) {
    grpc::ClientContext context;
    context.set_deadline(ToGrpcTime(deadline));
    AddCallMetadata(context, options_.security.token, adapter_id, checkpoint);
    WEFT_ASSIGN_OR_RETURN(const grpc::Status status,
                          attempt(trip.Next(), context));
    if (status.ok()) return absl::OkStatus();
    WEFT_ASSIGN_OR_RETURN(const bool goes_on,
                          trip.GoesOn(ReadFailure(status, context)));
    if (!goes_on) return FromGrpcStatus(status);
  }
}

template <typename Methods, typename Request, typename Response>
absl::StatusOr<Response> Client::Wait(
    AsyncMethod<Methods, Request, Response> method, Request request,
    bool repeat) {
  WEFT_ASSIGN_OR_RETURN(
      Reply<Response> reply,
      Send(route_, method, std::move(request), call_options(repeat)).get());
  return std::move(reply.message);
}

absl::StatusOr<v1::ServerInfo> Client::GetInfo() {
  WEFT_ASSIGN_OR_RETURN(auto response,
                        Wait(&Server::GetInfo, v1::GetInfoRequest()));
  return std::move(*response.mutable_info());
}

absl::StatusOr<bool> Client::IsHealthy(absl::string_view service) {
  // These have the fields of HealthCheckRequest and HealthCheckResponse.
  using Request = google::protobuf::StringValue;
  using Response = google::protobuf::Int32Value;
  constexpr int kServing = 1;
  Request request;
  request.set_value(std::string(service));
  Response response;
  const auto check = [&](Connection& connection, grpc::ClientContext& context) {
    grpc::TemplatedGenericStub<Request, Response> stub(connection.channel());
    const auto done = std::make_shared<std::promise<grpc::Status>>();
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check",
                   grpc::StubOptions(), &request, &response,
                   [done](grpc::Status status) { done->set_value(status); });
    return done->get_future().get();
  };
  WEFT_RETURN_IF_ERROR(Once("", check));
  return response.value() == kServing;
}

absl::Status Client::Drain() {
  return Wait(&Server::Drain, v1::DrainRequest(), /*repeat=*/false).status();
}

absl::Status Client::Undrain() {
  return Wait(&Server::Undrain, v1::UndrainRequest(), /*repeat=*/false)
      .status();
}

absl::Status Client::DrainLog() {
  return Wait(&Server::DrainLog, v1::DrainLogRequest(), /*repeat=*/false)
      .status();
}

absl::Status Client::WriteSnapshot() {
  return Wait(&Server::WriteSnapshot, v1::WriteSnapshotRequest(),
              /*repeat=*/false)
      .status();
}

absl::StatusOr<std::string> Client::Profile(uint32_t steps,
                                            absl::Duration time) {
  v1::ProfileRequest request;
  request.set_steps(steps);
  request.set_seconds(absl::ToDoubleSeconds(time));
  std::string trace;
  const auto profile = [&](Connection& connection,
                           grpc::ClientContext& context) {
    const auto reader = connection.server().Profile(&context, request);
    v1::ProfileResponse response;
    while (reader->Read(&response)) trace += response.trace();
    return reader->Finish();
  };
  WEFT_RETURN_IF_ERROR(Once("", profile));
  return trace;
}

absl::StatusOr<std::unique_ptr<AdapterHandle>> Client::CreateAdapter(
    absl::string_view adapter_id, v1::LoraConfig config,
    absl::string_view tenant, v1::Durability durability) {
  auto request = OfAdapter<v1::CreateAdapterRequest>(adapter_id);
  *request.mutable_config() = std::move(config);
  request.set_tenant(std::string(tenant));
  request.set_durability(durability);
  WEFT_ASSIGN_OR_RETURN(const auto response,
                        Wait(&Adapters::CreateAdapter, std::move(request)));
  return std::make_unique<AdapterHandle>(route_, call_options(),
                                         response.adapter());
}

absl::StatusOr<std::unique_ptr<AdapterHandle>> Client::OpenAdapter(
    absl::string_view adapter_id) {
  WEFT_ASSIGN_OR_RETURN(const v1::Adapter adapter, GetAdapter(adapter_id));
  return std::make_unique<AdapterHandle>(route_, call_options(), adapter);
}

absl::StatusOr<v1::Adapter> Client::ImportAdapter(absl::string_view adapter_id,
                                                  const std::string& folder,
                                                  absl::string_view tenant,
                                                  v1::Durability durability) {
  v1::ImportAdapterResponse response;
  v1::ImportAdapterRequest request;
  request.mutable_options()->set_adapter_id(std::string(adapter_id));
  request.mutable_options()->set_tenant(std::string(tenant));
  request.mutable_options()->set_durability(durability);
  const auto send = [&](Connection& connection, grpc::ClientContext& context) {
    return SendFiles(*connection.adapters().ImportAdapter(&context, &response),
                     context, request, folder, ReadPeftFolder);
  };
  WEFT_RETURN_IF_ERROR(Once(adapter_id, send));
  return std::move(*response.mutable_adapter());
}

absl::StatusOr<v1::Checkpoint> Client::UploadCheckpoint(
    const v1::UploadOptions& options, const std::string& folder) {
  v1::UploadCheckpointResponse response;
  v1::UploadCheckpointRequest request;
  *request.mutable_options() = options;
  const auto send = [&](Connection& connection, grpc::ClientContext& context) {
    return SendFiles(
        *connection.adapters().UploadCheckpoint(&context, &response), context,
        request, folder, ReadCheckpointFolder);
  };
  WEFT_RETURN_IF_ERROR(Once(options.adapter_id(), send));
  return std::move(*response.mutable_checkpoint());
}

absl::Status Client::ExportAdapter(absl::string_view adapter_id,
                                   absl::string_view snapshot,
                                   const std::string& folder,
                                   v1::Loader loader) {
  auto request = OfAdapter<v1::ExportAdapterRequest>(adapter_id);
  request.set_snapshot(std::string(snapshot));
  request.set_loader(loader);
  return Once(adapter_id,
              [&](Connection& connection, grpc::ClientContext& context) {
                return ReceiveFiles<v1::ExportAdapterResponse>(
                    *connection.adapters().ExportAdapter(&context, request),
                    context, folder);
              });
}

absl::Status Client::DownloadCheckpoint(absl::string_view adapter_id,
                                        absl::string_view name,
                                        const std::string& folder) {
  auto request = OfAdapter<v1::DownloadCheckpointRequest>(adapter_id);
  request.set_name(std::string(name));
  return Once(
      adapter_id, [&](Connection& connection, grpc::ClientContext& context) {
        return ReceiveFiles<v1::DownloadCheckpointResponse>(
            *connection.adapters().DownloadCheckpoint(&context, request),
            context, folder);
      });
}

absl::StatusOr<v1::Adapter> Client::GetAdapter(absl::string_view adapter_id) {
  WEFT_ASSIGN_OR_RETURN(auto response,
                        Wait(&Adapters::GetAdapter,
                             OfAdapter<v1::GetAdapterRequest>(adapter_id)));
  return std::move(*response.mutable_adapter());
}

absl::StatusOr<Reply<v1::ListAdaptersResponse>> Client::ListOne(
    const std::shared_ptr<Route>& route) const {
  CallOptions options = call_options();
  options.answered = route->answered();
  Reply<v1::ListAdaptersResponse> all;
  v1::ListAdaptersRequest request;
  do {
    WEFT_ASSIGN_OR_RETURN(
        auto page,
        Send(route, &Adapters::ListAdapters, request, options).get());
    // Another server has other adapters: it begins anew.
    if (!request.page_token().empty() && page.server != all.server) {
      return ListOne(route);
    }
    request.set_page_token(page.message.next_page_token());
    all.message.MergeFrom(page.message);
    all.server = std::move(page.server);
  } while (!request.page_token().empty());
  all.message.clear_next_page_token();
  return all;
}

absl::StatusOr<v1::ListAdaptersResponse> Client::ListAdapters(
    bool of_all_servers) {
  // Each server by the address that names it; empty: that of the client's
  // calls.
  std::vector<std::pair<std::string, std::shared_ptr<Route>>> servers = {
      {"", route_}};
  v1::ListAdaptersResponse all;
  for (size_t i = 0; i < servers.size(); ++i) {
    const auto [named, route] = servers[i];
    const auto list = ListOne(route);
    if (!list.ok()) {
      if (named.empty()) return list.status();
      return absl::Status(list.status().code(),
                          absl::StrCat("no adapters of ", named, ": ",
                                       list.status().message()));
    }
    all.mutable_adapters()->MergeFrom(list->message.adapters());
    if (!of_all_servers || list->server == named) continue;
    // The first server, or one in place of another, which may know a third.
    for (const std::string& other : list->message.others()) {
      if (std::ranges::any_of(
              servers, [&](const auto& one) { return one.first == other; })) {
        continue;
      }
      WEFT_ASSIGN_OR_RETURN(auto way, route->Other(list->server, other));
      servers.emplace_back(other, std::move(way));
    }
  }
  if (servers.size() > 1) OrderById(*all.mutable_adapters());
  return all;
}

absl::Status Client::DeleteAdapter(absl::string_view adapter_id) {
  return Wait(&Adapters::DeleteAdapter,
              OfAdapter<v1::DeleteAdapterRequest>(adapter_id))
      .status();
}

absl::Status Client::MoveAdapter(absl::string_view adapter_id, uint32_t log) {
  auto request = OfAdapter<v1::MoveAdapterRequest>(adapter_id);
  request.set_log(log);
  return Wait(&Adapters::MoveAdapter, std::move(request)).status();
}

absl::StatusOr<v1::Checkpoint> Client::SaveCheckpoint(
    const v1::SaveCheckpointRequest& request) {
  WEFT_ASSIGN_OR_RETURN(auto response, Wait(&Adapters::SaveCheckpoint, request,
                                            /*repeat=*/request.step() != 0));
  return std::move(*response.mutable_checkpoint());
}

absl::StatusOr<v1::Adapter> Client::LoadCheckpoint(
    const v1::LoadCheckpointRequest& request) {
  WEFT_ASSIGN_OR_RETURN(auto response, Wait(&Adapters::LoadCheckpoint, request,
                                            /*repeat=*/request.step() != 0));
  return std::move(*response.mutable_adapter());
}

absl::StatusOr<v1::ListCheckpointsResponse> Client::ListCheckpoints(
    absl::string_view adapter_id) {
  return Wait(&Adapters::ListCheckpoints,
              OfAdapter<v1::ListCheckpointsRequest>(adapter_id));
}

absl::Status Client::DeleteCheckpoint(absl::string_view adapter_id,
                                      absl::string_view name) {
  auto request = OfAdapter<v1::DeleteCheckpointRequest>(adapter_id);
  request.set_name(std::string(name));
  return Wait(&Adapters::DeleteCheckpoint, std::move(request)).status();
}

absl::StatusOr<v1::Checkpoint> Client::SetCheckpointTtl(
    const v1::SetCheckpointTtlRequest& request) {
  WEFT_ASSIGN_OR_RETURN(auto response,
                        Wait(&Adapters::SetCheckpointTtl, request));
  return std::move(*response.mutable_checkpoint());
}

absl::StatusOr<uint64_t> Client::PublishSnapshot(
    const v1::PublishSnapshotRequest& request) {
  WEFT_ASSIGN_OR_RETURN(const auto response,
                        Wait(&Adapters::PublishSnapshot, request,
                             /*repeat=*/request.step() != 0));
  return response.version();
}

absl::Status Client::ReleaseSnapshot(absl::string_view adapter_id,
                                     absl::string_view name) {
  auto request = OfAdapter<v1::ReleaseSnapshotRequest>(adapter_id);
  request.set_name(std::string(name));
  return Wait(&Adapters::ReleaseSnapshot, std::move(request)).status();
}

absl::StatusOr<v1::SampleResponse> Client::Sample(
    const v1::SampleRequest& request) {
  return Wait(&Sampling::Sample, request);
}

absl::Status Client::SampleStream(
    const v1::SampleRequest& request,
    const std::function<bool(const v1::SampleStreamResponse&)>& on_delta) {
  v1::SampleStreamRequest outer;
  *outer.mutable_request() = request;
  const auto stream = [&](Connection& connection,
                          grpc::ClientContext& context) {
    const auto reader = connection.sampling().SampleStream(&context, outer);
    v1::SampleStreamResponse delta;
    while (reader->Read(&delta)) {
      if (!on_delta(delta)) context.TryCancel();
    }
    return reader->Finish();
  };
  return Once(request.adapter_id(), stream, request.checkpoint());
}

}  // namespace weft::client
