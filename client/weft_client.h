// C++ client of a Weft server.
//
//   auto client = weft::Client::Connect({.target = "127.0.0.1:50051"});
//   auto adapter = (*client)->CreateAdapter("mine");
//   // Both steps are sent before the first result is awaited.
//   auto gradient = (*adapter)->ForwardBackward({*NextTokenDatum(ids)}, loss);
//   auto step = (*adapter)->OptimStep(adamw);
//   if (gradient.get().ok() && step.get().ok()) {
//     (*client)->Sample(request);
//   }
//
// The client takes and returns the messages of the .proto files. Every call has
// a deadline. If the server is unavailable, or is full and says when to retry,
// the client repeats most calls, with the same step number.
// Errors: the server's errors keep their code and message.
// Threads: any.
#ifndef WEFT_CLIENT_WEFT_CLIENT_H_
#define WEFT_CLIENT_WEFT_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/adapter_handle.h"
#include "client/channel.h"
#include "client/connection.h"
#include "client/retry.h"
#include "client/route.h"
#include "client/unary_call.h"
#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/sampling.grpc.pb.h"
#include "weft/v1/server.grpc.pb.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft::client {

struct ClientOptions {
  // The server's address, or those of several servers with commas between them:
  // the client calls the next when one cannot be reached. If another server has
  // the state, or a call's adapter, the client calls that one (route.h).
  std::string target = "127.0.0.1:50051";
  // The time for each call, including its repetitions.
  absl::Duration timeout = absl::Minutes(10);
  RetryPolicy retry = {};
  Security security = {};
};

// Makes a datum. With one target per token, all three arguments have shape [N].
// Empty weights mean 1 everywhere. For several targets per token, pass the
// targets of all tokens one after the other, and set targets_per_token or
// target_offsets afterwards.
v1::Datum MakeDatum(const std::vector<uint32_t>& tokens,
                    const std::vector<uint32_t>& targets,
                    const std::vector<float>& weights = {});

// Makes a datum in which every token predicts the next one. Targets in the
// prompt have weight 0. Errors: INVALID_ARGUMENT if there are fewer than 2
// tokens or the prompt is longer than the tokens.
absl::StatusOr<v1::Datum> NextTokenDatum(const std::vector<uint32_t>& tokens,
                                         size_t prompt_length = 0);

// Decodes a raw field of a result, which holds little-endian float32 values.
std::vector<float> ReadFloats(absl::string_view raw);

class Client {
 public:
  // Opens a channel, which connects at the first call. Errors: those of
  // OpenChannel.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);

  absl::StatusOr<v1::ServerInfo> GetInfo();
  // Returns whether a service is SERVING, according to grpc.health.v1. The
  // empty name asks whether the server takes work. "liveness" asks whether the
  // server's process is healthy. The call is not repeated.
  absl::StatusOr<bool> IsHealthy(absl::string_view service = "");
  // The calls are not repeated.
  absl::Status Drain();
  absl::Status Undrain();
  absl::Status DrainLog();
  absl::Status WriteSnapshot();
  // Records what the engine's thread does in `steps` pieces of work (0: no
  // limit), and at most for `time`. A piece is a micro-batch, an optimizer step
  // or a decode iteration. Returns a Chrome trace. The call is not repeated.
  absl::StatusOr<std::string> Profile(uint32_t steps, absl::Duration time);

  // Creates an adapter. The handle shares the client's connection and may
  // outlive the client. If `tenant` is empty, the server chooses the tenant.
  absl::StatusOr<std::unique_ptr<AdapterHandle>> CreateAdapter(
      absl::string_view adapter_id, v1::LoraConfig config = {},
      absl::string_view tenant = "",
      v1::Durability durability = v1::DURABILITY_UNSPECIFIED);
  // Returns a handle of an existing adapter. The handle's step numbers start
  // one above the adapter's latest step.
  absl::StatusOr<std::unique_ptr<AdapterHandle>> OpenAdapter(
      absl::string_view adapter_id);
  // Creates an adapter from a PEFT LoRA folder on this machine. The call is not
  // repeated.
  absl::StatusOr<v1::Adapter> ImportAdapter(
      absl::string_view adapter_id, const std::string& folder,
      absl::string_view tenant = "",
      v1::Durability durability = v1::DURABILITY_UNSPECIFIED);
  // Writes an adapter to a PEFT folder on this machine. An empty `snapshot`
  // means the latest weights. The call is not repeated.
  absl::Status ExportAdapter(absl::string_view adapter_id,
                             absl::string_view snapshot,
                             const std::string& folder,
                             v1::Loader loader = v1::LOADER_PEFT);

  // Writes a checkpoint's files to a folder on this machine. The call is not
  // repeated.
  absl::Status DownloadCheckpoint(absl::string_view adapter_id,
                                  absl::string_view name,
                                  const std::string& folder);
  // Makes a checkpoint on the server from a folder that DownloadCheckpoint
  // wrote. The call is not repeated.
  absl::StatusOr<v1::Checkpoint> UploadCheckpoint(
      const v1::UploadOptions& options, const std::string& folder);

  absl::StatusOr<v1::Adapter> GetAdapter(absl::string_view adapter_id);
  // Returns all adapters. Of servers that share a state, each has some of them:
  // the error of one that does not list its adapters has its address.
  // If not `of_all_servers`, returns those of the one that the client calls.
  absl::StatusOr<v1::ListAdaptersResponse> ListAdapters(
      bool of_all_servers = true);
  absl::Status DeleteAdapter(absl::string_view adapter_id);
  // Returns when the owner of the log has the adapter, or it has stayed.
  absl::Status MoveAdapter(absl::string_view adapter_id, uint32_t log);
  // SaveCheckpoint, LoadCheckpoint and PublishSnapshot are repeated only if the
  // request sets `step`. Otherwise the server might run the request twice.
  absl::StatusOr<v1::Checkpoint> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request);
  absl::StatusOr<v1::Adapter> LoadCheckpoint(
      const v1::LoadCheckpointRequest& request);
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(
      absl::string_view adapter_id);
  absl::Status DeleteCheckpoint(absl::string_view adapter_id,
                                absl::string_view name);
  absl::StatusOr<v1::Checkpoint> SetCheckpointTtl(
      const v1::SetCheckpointTtlRequest& request);
  absl::StatusOr<uint64_t> PublishSnapshot(
      const v1::PublishSnapshotRequest& request);
  absl::Status ReleaseSnapshot(absl::string_view adapter_id,
                               absl::string_view name);

  absl::StatusOr<v1::SampleResponse> Sample(const v1::SampleRequest& request);
  // Calls `on_delta` with each message, on this thread. If `on_delta` returns
  // false, the client cancels the call, and the result is normally CANCELLED.
  // `on_delta` may still get messages that had already arrived. The call is not
  // repeated.
  absl::Status SampleStream(
      const v1::SampleRequest& request,
      const std::function<bool(const v1::SampleStreamResponse&)>& on_delta);

 private:
  Client(ClientOptions options, std::shared_ptr<Route> route)
      : options_(std::move(options)), route_(std::move(route)) {}

  CallOptions call_options(bool repeat = true) const;
  // Makes an attempt of a call at a connection, and returns the call's status.
  // Errors: those that have another cause than the call.
  using Attempt = std::function<absl::StatusOr<grpc::Status>(
      Connection&, grpc::ClientContext&)>;
  // Makes a call that is not repeated, but goes on to other servers while it
  // has not run.
  absl::Status Once(absl::string_view adapter_id, const Attempt& attempt,
                    absl::string_view checkpoint = "") const;

  // Returns one server's adapters, the addresses of others, and its own.
  absl::StatusOr<Reply<v1::ListAdaptersResponse>> ListOne(
      const std::shared_ptr<Route>& route) const;

  // Calls `method` and waits for the reply.
  template <typename Methods, typename Request, typename Response>
  absl::StatusOr<Response> Wait(AsyncMethod<Methods, Request, Response> method,
                                Request request, bool repeat = true);

  const ClientOptions options_;
  const std::shared_ptr<Route> route_;
};

}  // namespace weft::client

namespace weft {
using client::Client;
}  // namespace weft

#endif  // WEFT_CLIENT_WEFT_CLIENT_H_
